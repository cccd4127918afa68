"""A node's engine under a virtual clock: continuous batching by decode steps, at the cost of its events alone.

It does what inference/node.py and the embedded engine do. A decode step gives every running sample a token. Samples
that wait are started in waves: at once when nothing runs, else when the rows that stood idle for them have lost
WAVE_STEPS steps' worth of work. A sample that starts gets two tokens in its first step (prefill, then decode), or one
if it takes the prompt of a member of its group that runs already (copy, then decode). Between two events (a wave, an
end, a submission, a cancellation) all steps are alike, so they are not simulated one by one: the engine counts its
steps, and a sample knows at which of them it will end. A test has both engines do the same.

    submit, cancel, flip at any time -> due() says when something happens next -> advance(then) -> what ended
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Literal

from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Lease
from buffer.scenario import Speed

InFlight = Literal["finish", "continue", "recompute"]

NEVER = math.inf
ENDED = -1  # the end of a job that has ended or was cancelled
WAVE_STEPS = 1 / 2  # as inference.torch_engine has it
BUCKET_S = 0.05  # how far a capped node may run ahead after a pause (inference.node.IDLE_S)


class Job:
    """Samples of one lease that start and end together: one, or with whole groups all. `steps` are the tokens of the
    longest, `tokens` those of each, `rows` the rows they take on the average."""

    __slots__ = (
        "end", "first_tokens", "flips", "lease", "open", "policy", "prompt", "room", "rows", "samples", "start",
        "steps", "tokens", "versions",
    )  # fmt: skip

    def __init__(self, lease: Lease, samples: tuple[int, ...], steps: float, rows: float, tokens: int) -> None:
        self.lease = lease
        self.samples = samples
        self.steps = steps
        self.rows = rows
        # Free rows that it needs to start. Several samples would start one by one, as rows become free; to start them
        # together when half of theirs are keeps as many rows busy on the average.
        self.room = rows if len(samples) == 1 else rows / 2
        self.tokens = tokens
        self.policy: PolicyId | None = None  # that samples it; None until it starts
        self.prompt: tuple[PolicyId, int] | None = None  # under which policy, and before which step, it was computed
        self.flips: tuple[tuple[int, PolicyId], ...] = ()  # (tokens before, policy of the last of them)
        self.start = 0  # the step in which it started, with which it had so many tokens
        self.first_tokens = 2
        self.end = NEVER
        self.open = True
        self.versions: tuple[VersionRun, ...] = ()


class VirtualEngine:
    """`done_rows` are tokens sampled, of samples that were cancelled too; `busy_s` is time with work, as nodes count
    it, up to the last time that there was none; `spared` are the samples of running jobs beyond the rows they take:
    the members of whole groups that would have ended by now."""

    __slots__ = (
        "_awake_since", "_compute", "_credit_s", "_ends", "_factor", "_idle_rows", "_in_flight", "_interval",
        "_next_at", "_order", "_rows", "_running", "_slots", "_speed", "_steps", "_waiting", "_waiting_rows",
        "_wave_step", "_yield_at", "busy_s", "done_rows", "policy", "spared",
    )  # fmt: skip

    def __init__(self, slots: int, speed: Speed, factor: float, in_flight: InFlight) -> None:
        """`factor` is on the time of its decode steps."""
        self.policy: PolicyId | None = None  # that serves; nothing starts without one
        self.busy_s = 0.0
        self.done_rows = 0.0
        self.spared = 0.0
        self._slots = slots
        self._speed = speed
        self._factor = factor
        self._in_flight = in_flight
        self._waiting: deque[Job] = deque()
        self._waiting_rows = 0.0
        self._running = 0
        self._rows = 0.0
        self._ends: list[tuple[float, int, Job]] = []  # heap; an entry is void when its job ends otherwise
        self._order = 0
        self._steps = 0  # begun so far
        self._next_at = 0.0  # when the next may begin
        self._yield_at = NEVER  # when the step under way ends, if samples end with it
        self._idle_rows = 0.0  # lost since the last wave, in row-steps
        self._wave_step = 0  # at the beginning of which the next wave starts; 0 is none
        self._interval = self._compute = 0.0
        self._awake_since = 0.0
        self._credit_s = 0.0  # of a pause that has just ended

    # --- what happens to it ------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        if not self._running and not self._waiting:
            self._awake_since = max(now, self._next_at)
            self._credit_s = min(BUCKET_S, self._awake_since - self._next_at)
        self._catch_up(now)
        self._waiting.append(job)
        self._waiting_rows += job.rows

    def cancel(self, job: Job, now: float) -> None:
        """Forget a job that has not ended."""
        self._catch_up(now)
        if job.policy is None:
            self._waiting.remove(job)
            self._waiting_rows -= job.rows
        else:
            self._release(job)
        job.end = ENDED
        self._sleep_if_empty()

    def drain(self, now: float) -> None:
        """Nothing that waits will start any more."""
        self._catch_up(now)
        self._waiting.clear()
        self._waiting_rows = 0.0
        self._sleep_if_empty()

    def flip(self, policy: PolicyId, now: float) -> None:
        """Serve a policy from the next step on; what runs goes on as `in_flight` says. Recomputing costs no time here,
        and as with the real engine brings a token more, since a prefill samples one too."""
        self.policy = policy
        if self._in_flight == "finish" or not self._running:
            return
        self._catch_up(now)
        for end, _, job in list(self._ends):
            if job.end == end > self._steps and job.lease.policy is None:
                self._rebind(job, policy)

    def _rebind(self, job: Job, policy: PolicyId) -> None:
        """A running job goes on under another policy."""
        assert job.policy is not None
        recomputed = policy, self._steps + 2
        if job.prompt is None or job.prompt[1] != recomputed[1]:  # else the one before has not even begun
            job.flips += ((self._steps - job.start + job.first_tokens, job.policy),)
            if self._in_flight == "recompute" and job.end > self._steps + 1:
                job.first_tokens += 1
                self.done_rows += job.rows
                self._end_with(job, job.end - 1)
        job.policy = policy
        if self._in_flight == "recompute":
            job.prompt = recomputed

    def stop(self, now: float) -> None:
        """Nothing more will happen here; the books are closed."""
        self._catch_up(now)
        if self._running or self._waiting:
            self.busy_s += now - self._awake_since
        self._waiting.clear()
        self._ends.clear()
        self._running = 0
        self._yield_at = NEVER

    # --- when something happens next ---------------------------------------------------------------------------------

    def due(self) -> float:
        """The time of the next wave or end; never, when nothing runs or can start. Call after every change."""
        speed, rows = self._speed, self._rows
        self._compute = (speed.step_s + speed.row_s * rows) * self._factor
        self._interval = self._compute
        if speed.tokens_per_second:
            self._interval = max(self._compute, (rows + self._waiting_rows) / speed.tokens_per_second)
        self._wave_step = self._next_wave()
        if self._yield_at < NEVER:
            return self._yield_at
        end = self._first_end()
        if self._wave_step and self._wave_step <= end:
            return self._next_at + (self._wave_step - self._steps - 1) * self._interval
        if end == NEVER:
            return NEVER
        return self._next_at + (end - self._steps - 1) * self._interval + self._compute

    def _first_end(self) -> float:
        """The step with which the next sample ends."""
        ends = self._ends
        while ends and ends[0][2].end != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0] if ends else NEVER

    def _next_wave(self) -> int:
        """The step in which waiting samples start; 0 when none can."""
        if not self._waiting or self.policy is None:
            return 0
        if not self._running:
            return self._steps + 1
        free = self._slots - self._rows
        if self._waiting[0].room > free:
            return 0
        lost = min(free, self._waiting_rows)
        return self._steps + max(1, math.ceil((WAVE_STEPS * self._slots - self._idle_rows) / lost))

    def advance(self, now: float) -> list[Job]:
        """Do what was due now. The jobs that ended, with their version runs."""
        if self._yield_at < NEVER:
            self._yield_at = NEVER
            return self._collect()
        end = self._first_end()
        if self._wave_step and self._wave_step <= end:
            self._start_wave(now)
            return []
        self._pass(int(end) - self._steps)
        return self._collect()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _catch_up(self, now: float) -> None:
        """Count the steps that have begun by now; the one with which a sample ends is left to yield."""
        if not self._running:
            self._next_at = max(self._next_at, now)
            return
        if self._yield_at < NEVER or now < self._next_at:
            return
        begun = int((now - self._next_at) / self._interval) + 1 if self._interval else 1 << 62
        if self._wave_step:
            begun = min(begun, self._wave_step - 1 - self._steps)
        left = self._first_end() - self._steps
        if begun >= left:
            begun = int(left)
        self._pass(begun)
        if begun == left:
            self._yield_at = self._next_at - self._interval + self._compute

    def _pass(self, steps: int) -> None:
        """So many like steps have begun."""
        self._steps += steps
        self._next_at += steps * self._interval
        self.done_rows += steps * self._rows
        if self._waiting and self._waiting[0].room <= self._slots - self._rows:
            self._idle_rows += steps * min(self._slots - self._rows, self._waiting_rows)
        elif steps:
            self._idle_rows = 0.0

    def _start_wave(self, now: float) -> None:
        """Begin the step in which waiting samples start; what starts has two tokens when it is over."""
        self._pass(self._wave_step - 1 - self._steps)
        assert self.policy is not None
        self._steps += 1
        in_engine = self._rows + self._waiting_rows
        second_tokens = 0.0
        holders = self._prompt_holders()
        while self._waiting and (self._waiting[0].room <= self._slots - self._rows or not self._running):
            job = self._waiting.popleft()
            self._waiting_rows -= job.rows
            policy = job.lease.policy or self.policy
            shares = (job.lease.lease, policy) in holders
            second_tokens += 0.0 if shares or job.steps == 1 else job.rows
            self._start(job, policy, 1 if shares else 2)
        if not self._waiting:
            self._waiting_rows = 0.0
        self._idle_rows = 0.0
        self.done_rows += self._rows + second_tokens
        speed = self._speed
        seconds = (speed.step_s + speed.row_s * self._rows) * self._factor
        self._next_at = now + seconds
        if speed.tokens_per_second:
            self._next_at = max(self._next_at, now - self._credit_s + in_engine / speed.tokens_per_second)
        self._credit_s = 0.0
        if self._first_end() <= self._steps:
            self._yield_at = now + seconds

    def _prompt_holders(self) -> set[tuple[int, PolicyId]]:
        """Whose prompts a late member of a group may take: leases with a sample that runs, by the policy that
        computed it."""
        if all(len(job.samples) == len(job.lease.samples) for job in self._waiting):
            return set()
        return {
            (job.lease.lease, job.prompt[0])
            for end, _, job in self._ends
            if job.end == end and job.prompt and job.prompt[1] <= self._steps
        }

    def _start(self, job: Job, policy: PolicyId, first_tokens: int) -> None:
        """`first_tokens`: how many it has at the end of the step that begins now."""
        job.policy = policy
        job.prompt = policy, self._steps + 1
        job.start = self._steps
        job.first_tokens = first_tokens
        self._rows += job.rows
        self.spared += len(job.samples) - job.rows
        self._running += 1
        self._end_with(job, self._steps + max(job.steps - first_tokens, 0))

    def _end_with(self, job: Job, step: float) -> None:
        job.end = step
        if step < NEVER:
            self._order += 1
            heapq.heappush(self._ends, (step, self._order, job))

    def _collect(self) -> list[Job]:
        """The jobs that end with the step just begun."""
        ended = []
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            end, _, job = heapq.heappop(ends)
            if job.end == end:
                job.versions = version_runs(job)
                job.end = ENDED
                self._release(job)
                ended.append(job)
        self._sleep_if_empty()
        return ended

    def _release(self, job: Job) -> None:
        self._running -= 1
        self._rows = self._rows - job.rows if self._running else 0.0
        self.spared = self.spared - len(job.samples) + job.rows if self._running else 0.0

    def _sleep_if_empty(self) -> None:
        if not self._running and not self._waiting:
            self._idle_rows = 0.0
            self.busy_s += max(0.0, self._next_at - self._awake_since)
            self._awake_since = self._next_at


def version_runs(job: Job) -> tuple[VersionRun, ...]:
    """Which policy each token of an ended job came from."""
    runs, done = [], 0
    assert job.policy is not None
    for until, policy in (*job.flips, (job.tokens, job.policy)):
        count = min(until, job.tokens) - done
        if count > 0:
            runs.append(VersionRun(policy.version, policy.digest, count))
            done += count
    return tuple(runs)

"""The real rules under a virtual clock: thousands of nodes, random durations, push delays, faults; seconds, not hours.

`simulate(rules, scenario)` drives `Replay` as the service would. The only thing that is pretended is the world around
it: nodes that sample for a random time and serve a new policy after a random push delay, a trainer that takes
`step_s` for a batch and looks at the version of every token it is given, and everything that goes wrong with them.
The same seed gives the same run. Times are in virtual seconds.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from async_rl.version import PolicyId, VersionRun, staleness
from async_rl.wire.messages import Disposition, Lease, SamplingParams
from buffer.events import (
    AnyEvent,
    BatchConfirmed,
    CancelLease,
    DrawRequested,
    Effect,
    EndRun,
    EvalFinished,
    EvalRequested,
    GrantLease,
    LendBatch,
    NodeAttested,
    NodeJoined,
    NodeLost,
    NodeWanted,
    PolicyRegistered,
    ResultArrived,
    RunFinished,
    Ticked,
)
from buffer.replay import Replay
from buffer.rules import Rules

Seconds = Callable[[random.Random], float]
"""A distribution of durations."""

TICKS_PER_TIMEOUT = 4  # how often deadlines are looked at, for each lease time-out
ENVELOPE_BYTES = 64  # what a simulated payload takes besides its version runs and its padding
RUN_BYTES = 16


def lognormal(median_s: float, sigma: float) -> Seconds:
    """Long-tailed, as answer lengths are."""
    return lambda rng: median_s * rng.lognormvariate(0.0, sigma)


def constant(seconds: float) -> Seconds:
    return lambda rng: seconds


class Scenario(NamedTuple):
    """The world. Probabilities are per sample unless said otherwise; all default to a world without faults."""

    seed: int = 0
    nodes: int = 4
    slots: int = 8
    sample_s: Seconds = constant(1.0)
    slowest: float = 1.0
    """A node's own factor on sample_s is drawn uniformly from [1, slowest]."""
    push_s: Seconds = constant(0.1)
    """From the registration of a policy until a node serves it, drawn anew for each node and policy."""
    step_s: Seconds = constant(1.0)
    in_flight: Literal["finish", "continue"] = "finish"
    tokens: tuple[int, int] = (16, 64)
    """Sampled tokens of an attempt, uniform; a payload takes `payload_share` of the group's reservation at most."""
    payload_share: float = 1.0
    node_life_s: float = 0.0
    """Mean of a node's exponential life; 0 is for ever. The last node that serves does not die."""
    notice_s: float = 3.0
    """From a death until the buffer knows of it (three heartbeats)."""
    rejoin_s: float = 10.0
    """From a death until a node of the same name joins again; may be shorter than notice_s."""
    undead: float = 0.0
    """Share of deaths that are none: the buffer gives the node up at once, and its results still come."""
    refused: float = 0.0
    env_failed: float = 0.0
    aborted: float = 0.0
    hangs: float = 0.0
    """Samples that never end, until their lease is cancelled."""
    zero_variance: float = 0.0
    """Share of task instances whose rewards are all equal."""
    skipped: float = 0.0
    """Share of batches of which the trainer refuses everything."""
    draw_timeout_s: float = 10_000.0
    """The trainer waits so long for one batch; then the run is stuck, and ends with who waited for whom."""
    eval_every: int = 0
    eval_n: int = 0
    eval_timeout_s: float = 30.0


class SimulationResult(NamedTuple):
    """`steps` confirmed in `seconds`; `error` is empty unless the run ended early, and says why. Staleness is counted
    per token lent to the trainer. Idle fractions are of the trainer's time, and of the slots that live nodes had."""

    steps: int
    seconds: float
    error: str
    staleness: dict[int, int]
    ledger: dict[str, int]
    eval_ledger: dict[str, int]
    outside: dict[str, int]
    evaluations: tuple[EvalFinished, ...]
    trainer_idle: float
    nodes_idle: float
    max_buffered_bytes: int
    events: int

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        tokens = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / tokens if tokens else 0.0


class _Attempt(msgspec.Struct, frozen=True, array_like=True):
    """What stands for an encoded trajectory: enough for the trainer to see which attempt it is, and its tokens' ages.
    Nothing is taken from the buffer's own records."""

    lease: int
    sample: int
    versions: tuple[VersionRun, ...]
    padding: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Attempt).decode


class _Job:
    """One sample on a node."""

    __slots__ = ("cancelled", "lease", "sample", "started_under")

    def __init__(self, lease: Lease, sample: int) -> None:
        self.lease = lease
        self.sample = sample
        self.started_under = PolicyId("", -1, "")
        self.cancelled = False


class _Node:
    """One life of a node; a node that joins again is a new one of the same name."""

    __slots__ = (
        "alive", "busy_s", "closed", "factor", "jobs", "joined_at", "lost_to_buffer", "name", "policy", "running",
        "slots", "told", "waiting",
    )  # fmt: skip

    def __init__(self, name: str, slots: int, factor: float, now: float) -> None:
        self.name = name
        self.slots = slots
        self.factor = factor
        self.joined_at = now
        self.policy: PolicyId | None = None
        self.waiting: deque[_Job] = deque()
        self.jobs: dict[int, list[_Job]] = {}
        self.running = 0
        self.closed = 0  # training samples finished or cancelled
        self.told = 0
        self.busy_s = 0.0
        self.alive = True
        self.lost_to_buffer = False

    def wanted(self) -> int:
        """Every slot busy and a few more samples at hand, as a running total."""
        return self.closed + self.slots + max(1, self.slots // 4)


class Simulation:
    """State of a run; `simulate` is the way in. `check(replay, now)` is called after every event."""

    def __init__(self, rules: Rules, scenario: Scenario, check: Callable[[Replay, float], None] | None = None) -> None:
        self.rules = rules
        self.scenario = scenario
        self.replay = Replay(rules)
        self._check = check
        self._rng = random.Random(scenario.seed)
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._events = 0
        self._nodes: dict[str, _Node] = {}
        self._serving = 0  # live nodes with a policy
        self._newest = PolicyId("main", 0, "d0")
        self._served: list[PolicyId] = []  # by version: the policy that was published under it
        self._error = ""
        self._done = False
        self._staleness: Counter[int] = Counter()
        self._evaluations: list[EvalFinished] = []
        self._drawn_at = 0.0
        self._trainer_idle_s = 0.0
        self._slot_s = 0.0
        self._busy_s = 0.0
        self._max_bytes = 0
        self._largest_payload = int(rules.group_bytes / rules.group_size * scenario.payload_share)

    def run(self) -> SimulationResult:
        for index in range(self.scenario.nodes):
            self._join(f"node-{index}")
        self._at(0.0, lambda: self._publish(self._newest))
        self._at(0.0, self._draw)
        self._tick()
        while self._queue and not self._done and not self._error:
            self._now, _, act = heapq.heappop(self._queue)
            act()
        self._apply(RunFinished(self._error or "all steps are done"))
        for node in self._nodes.values():
            if node.alive:
                self._retire(node)
        return self._result()

    def _result(self) -> SimulationResult:
        replay = self.replay
        return SimulationResult(
            steps=replay.confirmed_batches,
            seconds=self._now,
            error=self._error,
            staleness=dict(self._staleness),
            ledger=replay.ledger,
            eval_ledger=replay.eval_ledger,
            outside=replay.outside,
            evaluations=tuple(self._evaluations),
            trainer_idle=self._trainer_idle_s / self._now if self._now else 0.0,
            nodes_idle=1.0 - self._busy_s / self._slot_s if self._slot_s else 0.0,
            max_buffered_bytes=self._max_bytes,
            events=self._events,
        )

    # --- the clock ---------------------------------------------------------------------------------------------------

    def _at(self, delay: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self._now + delay, self._count, act))

    def _apply(self, event: AnyEvent) -> None:
        effects = self.replay.apply(event, self._now)
        self._events += 1
        self._max_bytes = max(self._max_bytes, self.replay.ready_bytes + self.replay.reserved_bytes)
        if self._check is not None:
            self._check(self.replay, self._now)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case GrantLease(node=name, lease=lease):
                self._take(self._nodes[name], lease)
            case CancelLease(node=name, lease=lease_id):
                self._drop(self._nodes[name], lease_id)
            case LendBatch():
                self._train(effect)
            case EvalFinished():
                self._evaluations.append(effect)
            case EndRun(error=error):
                self._error = error

    def _tick(self) -> None:
        """Deadlines are looked at, the trainer's own included."""
        self._at(self.rules.lease_timeout / TICKS_PER_TIMEOUT, self._tick)
        self._apply(Ticked())
        if self.replay.draw_pending and self._now - self._drawn_at > self.scenario.draw_timeout_s:
            self._error = f"stuck after {self.replay.confirmed_batches} steps: {self.replay.waiting(self._now)}"

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _join(self, name: str) -> None:
        scenario = self.scenario
        node = _Node(name, scenario.slots, self._rng.uniform(1.0, scenario.slowest), self._now)
        self._nodes[name] = node
        self._apply(NodeJoined(name, node.slots))
        if self._served:
            self._at(scenario.push_s(self._rng), lambda: self._flip(node))
        if scenario.node_life_s:
            self._at(self._rng.expovariate(1 / scenario.node_life_s), lambda: self._die(node))

    def _flip(self, node: _Node) -> None:
        """The push to this node is complete: it serves the newest policy there is by now, and may skip some."""
        if node.alive and node.policy != self._newest:
            self._serving += node.policy is None
            node.policy = self._newest
            self._apply(NodeAttested(node.name, node.policy))
            self._ask(node)

    def _ask(self, node: _Node) -> None:
        """Asked again only when the node runs dry, to spare messages; the count is cumulative."""
        if node.policy is not None and not node.waiting and node.wanted() > node.told:
            node.told = node.wanted()
            self._apply(NodeWanted(node.name, node.told))

    def _take(self, node: _Node, lease: Lease) -> None:
        jobs = [_Job(lease, sample) for sample in lease.samples]
        if node.alive:
            node.jobs[lease.lease] = jobs
            # Evaluation is within the node's share already, so it starts before training work.
            (node.waiting.extendleft if lease.split == "eval" else node.waiting.extend)(jobs)
            self._fill_slots(node)

    def _fill_slots(self, node: _Node) -> None:
        while node.waiting and node.running < node.slots:
            job = node.waiting.popleft()
            if job.cancelled:
                continue
            assert node.policy is not None
            assert node.policy.version >= job.lease.min_version or job.lease.policy is not None
            job.started_under = job.lease.policy or node.policy
            node.running += 1
            if self._rng.random() >= self.scenario.hangs:
                seconds = self.scenario.sample_s(self._rng) * node.factor
                self._at(seconds, lambda job=job, seconds=seconds: self._finish(node, job, seconds))  # type: ignore[misc]

    def _finish(self, node: _Node, job: _Job, seconds: float) -> None:
        if job.cancelled or not (node.alive or node.lost_to_buffer):
            return
        self._close(node, job)
        node.busy_s += seconds
        self._apply(self._outcome(node, job))
        if node.alive:
            self._fill_slots(node)
            self._ask(node)

    def _close(self, node: _Node, job: _Job) -> None:
        job.cancelled = True
        node.running -= 1
        node.closed += job.lease.split == "train"
        jobs = node.jobs[job.lease.lease]
        jobs.remove(job)
        if not jobs:
            del node.jobs[job.lease.lease]

    def _drop(self, node: _Node, lease_id: int) -> None:
        """A lease was cancelled."""
        for job in list(node.jobs.get(lease_id, ())):
            started = job.started_under.version >= 0
            self._close(node, job)
            node.running += not started
        node.waiting = deque(job for job in node.waiting if not job.cancelled)
        self._at(0.0, lambda: self._refill(node))

    def _refill(self, node: _Node) -> None:
        if node.alive:
            self._fill_slots(node)
            self._ask(node)

    def _outcome(self, node: _Node, job: _Job) -> ResultArrived:
        rng, scenario, lease = self._rng, self.scenario, job.lease
        draw = rng.random()
        status: Literal["ok", "env_failed", "aborted"] = "ok"
        if draw < scenario.env_failed:
            status = "env_failed"
        elif draw < scenario.env_failed + scenario.aborted:
            status = "aborted"
        # Decided by the instance alone, since all samples of a group must agree on it.
        equal = lease.instance % 1_000_003 < scenario.zero_variance * 1_000_003
        tokens = rng.randint(*scenario.tokens)
        versions = self._stamps(node, job, tokens) if status == "ok" else ()
        return ResultArrived(
            node=node.name,
            lease=lease.lease,
            sample=job.sample,
            status=status,
            reward=1.0 if equal else rng.random(),
            versions=versions,
            n_tokens=tokens,
            payload=self._payload(lease.lease, job.sample, versions),
            problem="simulated" if status == "ok" and rng.random() < scenario.refused else "",
        )

    def _payload(self, lease: int, sample: int, versions: tuple[VersionRun, ...]) -> bytes:
        """What the trainer will read, padded to a random size up to the largest allowed."""
        overhead = ENVELOPE_BYTES + RUN_BYTES * len(versions)
        padding = max(0, self._rng.randint(0, self._largest_payload) - overhead)
        return _encode(_Attempt(lease, sample, versions, bytes(padding)))

    def _stamps(self, node: _Node, job: _Job, tokens: int) -> tuple[VersionRun, ...]:
        """Which policy each token came from. Under `continue` those served meanwhile share the tokens out."""
        first = job.started_under
        if self.scenario.in_flight == "finish" or job.lease.policy is not None or node.policy is None:
            return (VersionRun(first.version, first.digest, tokens),)
        last = min(node.policy.version, first.version + tokens - 1)
        runs = [self._served[version] for version in range(first.version, last + 1)]
        rest = tokens - (len(runs) - 1)
        return tuple(
            VersionRun(version, policy.digest, rest if position == 0 else 1)
            for position, (version, policy) in enumerate(zip(range(first.version, last + 1), runs, strict=True))
        )

    def _die(self, node: _Node) -> None:
        if self._serving - (node.policy is not None) < 1:
            return
        node.alive = False
        self._serving -= node.policy is not None
        self._retire(node)
        if self._rng.random() < self.scenario.undead:
            node.lost_to_buffer = True
            self._apply(NodeLost(node.name, "thought dead"))
        else:
            self._at(self.scenario.notice_s, lambda: self._notice(node))
        self._at(self.scenario.rejoin_s, lambda: self._join(node.name))

    def _notice(self, node: _Node) -> None:
        """Unless a new life of that name has joined in the meantime, which has closed the old one's leases."""
        if self._nodes[node.name] is node:
            self._apply(NodeLost(node.name, "silent for three heartbeats"))

    def _retire(self, node: _Node) -> None:
        self._slot_s += node.slots * (self._now - node.joined_at)
        self._busy_s += node.busy_s
        node.joined_at, node.busy_s = self._now, 0.0

    # --- the trainer -------------------------------------------------------------------------------------------------

    def _publish(self, policy: PolicyId) -> None:
        self._served.append(policy)
        self._newest = policy
        self._apply(PolicyRegistered(policy))
        for node in self._nodes.values():
            if node.alive:
                self._at(self.scenario.push_s(self._rng), lambda node=node: self._flip(node))  # type: ignore[misc]
        scenario = self.scenario
        if scenario.eval_every and policy.version % scenario.eval_every == 0:
            sampling = SamplingParams(0.0, 64)
            self._apply(EvalRequested(policy, scenario.eval_n, sampling, scenario.eval_timeout_s))

    def _draw(self) -> None:
        self._drawn_at = self._now
        self._apply(DrawRequested(len(self._served) - 1))

    def _train(self, batch: LendBatch) -> None:
        self._trainer_idle_s += self._now - self._drawn_at
        dispositions: list[Disposition] = []
        skipped = self._rng.random() < self.scenario.skipped
        for payload in batch.payloads:
            attempt = _decode(payload)
            dispositions.append(Disposition(attempt.lease, attempt.sample, "refused" if skipped else "trained"))
            for run in attempt.versions:
                self._staleness[staleness(batch.for_version, run.version)] += run.count
        self._at(self.scenario.step_s(self._rng), lambda: self._confirm(batch, tuple(dispositions), skipped))

    def _confirm(self, batch: LendBatch, dispositions: tuple[Disposition, ...], skipped: bool) -> None:
        version = batch.for_version + 1
        self._publish(PolicyId("main", version, self._newest.digest if skipped else f"d{version}"))
        self._apply(BatchConfirmed(batch.batch, dispositions))
        if version == self.rules.steps:
            self._done = True
        else:
            self._draw()


def simulate(
    rules: Rules, scenario: Scenario, check: Callable[[Replay, float], None] | None = None
) -> SimulationResult:
    """Run until all steps are confirmed, the rules end the run, or nothing can happen any more (see `error`)."""
    return Simulation(rules, scenario, check).run()

"""Which completion goes to which scoring worker, and what becomes of it when a worker fails: rules without processes.

    submit ─> queue ─> sent to a worker ─> a verdict ─> given back to the node
                ^            │
                └── failed, or sent to a worker that was lost

A completion whose scoring failed is scored again, `tries` times in all, so that a reward which crashes by chance costs
no sample, be it good or bad; then it is given up with the last reason. Who made a worker crash is found out, not
guessed: where it may have been one of several that it worked on at once, each of these is scored alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inference.scoring_worker import Job, Reading, Verdict

BATCH = 16  # completions in a worker's pipe at once: more saves little, and all wait behind one that hangs
BATCH_S = 0.01  # of work in a worker's pipe: what takes longer is not kept from another worker that has none
RECENT = 0.1  # the share of the last completion in the mean time of one
READ_S = 3600.0  # for a worker before it scores: to read data up to an instance is no fault of completion or reward
MAX_REASON = 160  # characters; a note has 200


@dataclass
class Waiting:
    """A completion without a verdict."""

    job: Job
    failures: int = 0
    alone: bool = False


@dataclass
class Seat:
    """A worker. `concurrency` is 0 until it has started."""

    concurrency: int = 0
    seconds: float = 0.0
    sent: dict[int, Waiting] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)
    """Since when the worker may be at which: the first `concurrency` of those sent."""
    reading: set[int] = field(default_factory=set)
    """Those that it does not score yet: it looks for the instance, or another one comes first."""

    def limit(self, number: int, timeout_s: float) -> float:
        """Seconds from when it began."""
        return READ_S if number in self.reading else timeout_s + self.seconds


class ScoringQueue:
    """Completions, and at most `workers` workers under numbers of the caller's choice. Every submitted completion gets
    one verdict, returned by `answered`, `lost`, `late` or `not_started`."""

    def __init__(self, workers: int, tries: int) -> None:
        self._workers = workers
        self._tries = tries
        self._queue: deque[Waiting] = deque()
        self._seats: dict[int, Seat] = {}
        self._mean_s = BATCH_S  # of one completion, lately; at first one each

    def submit(self, job: Job) -> None:
        self._queue.append(Waiting(job))

    # --- workers -----------------------------------------------------------------------------------------------------

    @property
    def to_start(self) -> int:
        """How many workers to start now: none while one has room, and no more at once than there are already, as each
        takes a second of a processor that has better to do."""
        starting = sum(not seat.concurrency for seat in self._seats.values())
        if not self._queue or any(self._room(seat) for seat in self._seats.values()):
            return 0
        at_once = max(1, len(self._seats) - starting) - starting
        return max(0, min(self._workers - len(self._seats), at_once, len(self._queue) - starting))

    def start(self, worker: int) -> None:
        self._seats[worker] = Seat()

    def started(self, worker: int, concurrency: int, seconds: float) -> None:
        """It scores so many at once, and one may take so many seconds beyond the time-out."""
        self._seats[worker].concurrency, self._seats[worker].seconds = concurrency, seconds

    def not_started(self, worker: int, why: str) -> list[Verdict]:
        """The next completion bears it, whichever it is: something has to."""
        del self._seats[worker]
        return [Verdict(self._queue.popleft().job.number, 0.0, {}, 0.0, why)] if self._queue else []

    # --- completions -------------------------------------------------------------------------------------------------

    def take(self, worker: int, now: float) -> list[Job]:
        """What to send it now."""
        seat, taken = self._seats[worker], []
        while self._queue and self._room(seat):
            waiting = self._queue.popleft()
            seat.sent[waiting.job.number] = waiting
            taken.append(waiting.job)
        self._begin(seat, now)
        return taken

    def reads(self, worker: int, reading: Reading, now: float) -> None:
        """Its time begins anew when the instance is found. Raises KeyError as `answered` does."""
        seat = self._seats[worker]
        if reading.number not in seat.begun:
            raise KeyError(reading.number)
        seat.begun[reading.number] = now
        (seat.reading.discard if reading.done else seat.reading.add)(reading.number)

    def answered(self, worker: int, verdict: Verdict, now: float) -> Verdict | None:
        """The verdict, or None when the completion is to be scored again. Raises KeyError for one that the worker was
        not sent."""
        seat = self._seats[worker]
        waiting = seat.sent.pop(verdict.number)
        seat.begun.pop(verdict.number, None)
        seat.reading.discard(verdict.number)
        self._begin(seat, now)
        self._mean_s += RECENT * (verdict.seconds - self._mean_s)
        return self._failed(waiting, verdict.error, verdict.seconds) if verdict.error else verdict

    def deadline(self, worker: int, timeout_s: float) -> float | None:
        """When the first of those that it works on is late; None when it works on none."""
        seat = self._seats[worker]
        return min((since + seat.limit(number, timeout_s) for number, since in seat.begun.items()), default=None)

    def late(self, worker: int, timeout_s: float, now: float) -> list[Verdict]:
        """The worker was killed since something took too long: that has failed; the others are innocent."""
        seat = self._seats.pop(worker)
        limit = timeout_s + seat.seconds
        late = [number for number, since in seat.begun.items() if now >= since + seat.limit(number, timeout_s)]
        if any(number in seat.reading for number in late):
            return self._leave(seat, late, f"reading its data took longer than {READ_S:g} s: worker killed", READ_S)
        why = f"scoring one completion took longer than {limit:g} s: worker killed"
        return self._leave(seat, late, why, limit)

    def lost(self, worker: int, why: str, seconds: float = 0.0) -> list[Verdict]:
        """It died, or is of no use any more."""
        seat = self._seats.pop(worker)
        suspects = list(seat.begun)
        if len(suspects) == 1:
            return self._leave(seat, suspects, why, seconds)
        for number in suspects:
            seat.sent[number].alone = True
        return self._leave(seat, [], why, seconds)

    def _leave(self, seat: Seat, guilty: list[int], why: str, seconds: float) -> list[Verdict]:
        """What was sent goes back to the head of the queue, in its order; those that are given up are returned."""
        given_up = []
        for number, waiting in reversed(seat.sent.items()):
            if number not in guilty:
                self._queue.appendleft(waiting)
            elif (verdict := self._failed(waiting, why, seconds)) is not None:
                given_up.append(verdict)
        return given_up

    def _failed(self, waiting: Waiting, why: str, seconds: float) -> Verdict | None:
        waiting.failures += 1
        if waiting.failures < self._tries:
            self._queue.appendleft(waiting)
            return None
        times = f" ({waiting.failures} times in a row)" if waiting.failures > 1 else ""
        return Verdict(waiting.job.number, 0.0, {}, seconds, why[:MAX_REASON] + times)

    def _room(self, seat: Seat) -> bool:
        """Whether it may have the head of the queue."""
        if any(waiting.alone for waiting in seat.sent.values()) or (self._queue and self._queue[0].alone):
            return bool(seat.concurrency) and not seat.sent
        if seat.concurrency == 1:
            return len(seat.sent) < max(1, min(BATCH, int(BATCH_S / max(self._mean_s, 1e-9))))
        return len(seat.sent) < seat.concurrency

    def _begin(self, seat: Seat, now: float) -> None:
        for number in list(seat.sent)[: seat.concurrency]:
            seat.begun.setdefault(number, now)

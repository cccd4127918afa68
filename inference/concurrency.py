"""How many requests a node has in flight: as many as its server can hold, found from the server's own signals, pure.

A server that is given more than its KV cache holds preempts: it throws away what it computed for a request, and
computes it again later. One that is given less decodes small batches. How many fit depends on how long the answers are
by now, so the limit follows them:

    mean KV use   0 ········ LOW ········ HIGH ···· 1      many preemptions       a queue that stays
                  grow        hold        back off         back off, at once      down to what the server runs

The clock of this loop is the *generation*: as many requests have ended as the limit lets in. What a limit does to the
KV cache shows when the requests that it let in have grown, be it after a second or an hour, so that is when it is
judged, by the means over the generation; of a few requests the KV use at one moment says little. Only preemptions act
at once, since they cost work. After a step back, a generation begins when those beyond the new limit have ended.

A limit of 64 (`slots`), and answers whose KV cache fits 40 times:
    1. The server runs 41, has preempted 9, and KV use is 0.99. The limit becomes 3/4 of the 41: 30.
    2. 64 are in flight. Until 34 of them have ended nothing is learned, as they came under the old limit.
    3. 30 more end, with a mean KV use of 0.70: below LOW, and the gate was full. One eighth more: 33.
    4. 33 end, with 0.77: hold. It settles here.
    5. Answers become twice as long: 33 end, with 0.93, and 3 preemptions, which is few. The limit becomes 7/8 of 33:
       28. Then 24, 21, 18: 0.84 on the mean, and it holds.
    6. They become short again: 0.42. 20, 22, 24, 27, 30, 33: in six generations it is back.

Guarantees, whatever the signals: the limit is from `floor` to `most`; it changes by a signal alone, so it holds while
none comes; the first signal after STALE_S without one changes nothing, and begins a generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.engine import EngineError
from inference.server import Signals

HIGH, LOW = 0.90, 0.75
"""Shares of the KV cache, means of a generation. Above HIGH, requests that happen to grow together lead to preemptions.
Neither rule leads into the other's: HIGH x BACK_OFF = 0.79 is above LOW, LOW x (1 + GROWTH) = 0.84 is below HIGH."""
BACK_OFF, GROWTH = 7 / 8, 1 / 8
BACK_OFF_PREEMPTED = 3 / 4  # of what ran: the cache was full, and is to be between LOW and HIGH
FEW_PREEMPTED = 1 / 8  # of the limit, in a generation: that many cost less than decoding fewer at a time
FULL_SHARE = 7 / 8  # of the limit in flight: with less it is leases that are few, and a larger limit would be untried
QUEUE_SHARE = 1 / 4  # of those in flight: what has just come, or comes again after a flip, is queued for a step or two
STALE_S = 10.0  # between two signals: what happened in a longer time is not the doing of the limit by now


@dataclass(slots=True)
class _Generation:
    """Sums over its looks, and counts."""

    looks: int = 0
    kv_use: float = 0.0
    queued: float = 0.0
    running: float = 0.0
    in_flight: float = 0.0
    finished: int = 0
    preempted: int = 0


class ConcurrencyLimit:
    """`most` is what the server was started for. The limit begins there: who has chosen it well loses nothing so, and
    who has not, one generation. Raises EngineError for a floor that is not from 1 to `most`."""

    def __init__(self, most: int, floor: int = 1) -> None:
        if not 1 <= floor <= most:
            raise EngineError(f"requests in flight from {floor} to {most}: the first must be from 1 to the second")
        self.most, self.floor = most, floor
        self.limit = most
        self._generation = _Generation()
        self._seen: Signals | None = None
        self._seen_at = 0.0
        self._finished = 0
        self._draining = False  # since the last step back more are in flight than it allows

    def look(self, signals: Signals, *, in_flight: int, finished: int, now: float) -> int:
        """What the limit is, now that the server says this. `in_flight` requests were given to it and have not ended,
        `finished` have ended since the start; `now` in seconds of the monotonic clock."""
        before, since = self._seen, now - self._seen_at
        ended = max(0, finished - self._finished)
        self._seen, self._seen_at, self._finished = signals, now, finished
        self._draining = self._draining and in_flight > self.limit
        if before is None or since > STALE_S:
            self._generation = _Generation()
        elif not self._draining:
            self._add(signals, in_flight, ended, max(0, signals.preempted - before.preempted))
            self._judge(signals)
        return self.limit

    def _add(self, signals: Signals, in_flight: int, ended: int, preempted: int) -> None:
        sums = self._generation
        sums.looks += 1
        sums.kv_use += signals.kv_use
        sums.queued += signals.queued
        sums.running += signals.running
        sums.in_flight += in_flight
        sums.finished += ended
        sums.preempted += preempted

    def _judge(self, signals: Signals) -> None:
        sums = self._generation
        if sums.preempted > FEW_PREEMPTED * self.limit:
            # What a server preempts it queues, so what runs is what fits.
            self._begin(int(min(self.limit, signals.running or self.limit) * BACK_OFF_PREEMPTED))
        elif sums.finished >= self.limit:
            self._begin(self._judged(sums))

    def _judged(self, sums: _Generation) -> int:
        """The limit after a whole generation."""
        if sums.kv_use > HIGH * sums.looks:
            return int(self.limit * BACK_OFF)
        if sums.queued > QUEUE_SHARE * sums.in_flight:
            # Queued without being short of memory: it has a bound of its own, below which there is no need to go.
            return min(self.limit, max(round(sums.running / sums.looks), int(self.limit * BACK_OFF)))
        full = sums.in_flight >= FULL_SHARE * self.limit * sums.looks
        if sums.kv_use < LOW * sums.looks and full and not sums.preempted:
            return self.limit + max(1, int(self.limit * GROWTH))
        return self.limit

    def _begin(self, limit: int) -> None:
        limit = max(self.floor, min(limit, self.most))
        self._draining = limit < self.limit  # whether so many are in flight shows at the next look
        self.limit = limit
        self._generation = _Generation()

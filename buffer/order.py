"""Order: which ready groups the next batch is made of.

One rule serves both orders. Let s be the oldest ticket neither ready nor drawn. Eligible are the ready tickets below
s + W; a batch is the B lowest of them. With W = 1 that is `fifo` (only what lies before the oldest unfinished ticket,
so stragglers are waited for); with a larger W it is `windowed` (up to W - 1 tickets may overtake a straggler).

The bound. Let ticket n be in batch b, counted from 0, so b * B tickets were drawn before that batch.
  (a) Of those at most n lie below n.
  (b) Those above n: let m > n be drawn in an earlier batch. If n had been ready then, n < m < s + W would have made it
      eligible too, and lowest first would have drawn it. So n was neither ready nor drawn: s <= n and m < n + W. There
      are at most W - 1 such m.
  (c) So b * B <= n + W - 1, and b <= floor((n + W - 1) / B) <= floor(n / B) + ceil((W - 1) / B).
Admission gives v >= floor(n / B) - K_a for every token of n, and the step that trains batch b starts from version b.
So staleness b - v <= K_a + ceil((W - 1) / B), which is K by the choice of K_a (async_rl.config.lead); K_a = K if W = 1.
Nothing here assumes that n was sampled once: a ticket dropped and leased again only becomes newer.

No deadlock. After c batches c * B tickets are drawn, so among the (c + 1) * B tickets that a node of version c may
lease at least B are not. The trainer waits only while fewer than B are eligible, so s is one of the tickets that a node
of version c may lease (were all below (c + 1) * B settled, B of them would lie below s), and s is leased first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

UNSETTLED, READY, GONE = 0, 1, 2  # GONE from here: drawn or spent, or ready and filed elsewhere


class Order:
    """Tickets that were made and not drawn, as the draw sees them. They are made in rising order and s only rises, so
    each ticket is passed once: O(1) a ticket but for those that overtake, O(log W). Only `reopened` costs O(resident),
    and it happens only when a ready group turns out stale."""

    def __init__(self, groups_per_batch: int, window: int) -> None:
        self.groups_per_batch = groups_per_batch
        self.window = window
        self._oldest = 0  # s
        self._states = bytearray()  # of tickets from s to the newest that was made
        self._beyond = 0  # how many of these are READY: s + W and later
        self._passed: deque[int] = deque()  # ready, below s, rising
        self._overtaking: list[int] = []  # ready, s < ticket < s + W: a heap

    def made(self, ticket: int) -> None:
        """A ticket exists now (or still, after a resume). Tickets are made in rising order; those left out are
        spent."""
        states = self._states
        if not states:
            self._oldest = ticket
        states += bytes([GONE]) * (ticket - self._oldest - len(states))
        states.append(UNSETTLED)

    def resume_at(self, next_ticket: int) -> None:
        """Tickets below that were not made here are spent."""
        if not self._states:
            self._oldest = next_ticket

    def oldest_unsettled(self) -> int:
        """s: the oldest ticket neither ready nor drawn; the next new one when all are."""
        return self._oldest

    @property
    def batch_ready(self) -> bool:
        return len(self._passed) + len(self._overtaking) >= self.groups_per_batch

    @property
    def ready_groups(self) -> int:
        return len(self._passed) + len(self._overtaking) + self._beyond

    def ready(self, ticket: int, oldest_version: int = 0) -> None:
        """The group of a ticket is complete; how old its tokens are is nothing to an order by ticket."""
        place = ticket - self._oldest
        assert self._states[place] == UNSETTLED
        if place >= self.window:
            self._states[place] = READY
            self._beyond += 1
            return
        self._states[place] = GONE
        if place:
            heapq.heappush(self._overtaking, ticket)
        else:
            self._passed.append(ticket)
            self._advance()

    def reopened(self, tickets: Iterable[int]) -> None:
        """Ready groups that are not ready any more; s may move back."""
        gone = set(tickets)
        first, before = self._oldest, self._states
        beyond = (first + place for place, state in enumerate(before) if state == READY)
        ready = sorted({*self._passed, *self._overtaking, *beyond} - gone)
        self._oldest = oldest = min(first, *gone)
        self._states = bytearray([GONE]) * (first - oldest) + before.replace(bytes([READY]), bytes([GONE]))
        for ticket in gone:
            self._states[ticket - oldest] = UNSETTLED
        end = oldest + self.window
        self._passed = deque(ticket for ticket in ready if ticket < oldest)
        self._overtaking = [ticket for ticket in ready if oldest <= ticket < end]  # sorted, and so a heap
        self._beyond = 0
        for ticket in ready:
            if ticket >= end:
                self._states[ticket - oldest] = READY
                self._beyond += 1

    def draw(self) -> list[int]:
        """The next batch's tickets, lowest first. Call only when `batch_ready`."""
        passed, overtaking = self._passed, self._overtaking
        return [passed.popleft() if passed else heapq.heappop(overtaking) for _ in range(self.groups_per_batch)]

    def _advance(self) -> None:
        """Move s on to the next unsettled ticket, and the end of the window with it."""
        states, overtaking, passed, window = self._states, self._overtaking, self._passed, self.window
        oldest, place = self._oldest, 0
        while place < len(states) and states[place] != UNSETTLED:
            place += 1
            entering = place + window - 1
            if entering < len(states) and states[entering] == READY:
                states[entering] = GONE
                self._beyond -= 1
                heapq.heappush(overtaking, oldest + entering)
            if overtaking and overtaking[0] == oldest + place:
                passed.append(heapq.heappop(overtaking))
        del states[:place]
        self._oldest += place

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
from collections.abc import Iterable


class Order:
    """Tickets that were made and not drawn, as the draw sees them. O(log resident) for each ticket's step; only
    `reopened` costs O(ready), and it happens only when a ready group turns out stale."""

    def __init__(self, groups_per_batch: int, window: int) -> None:
        self.groups_per_batch = groups_per_batch
        self.window = window
        self._next = 0
        self._unsettled: set[int] = set()
        self._unsettled_heap: list[int] = []  # may hold tickets that have settled since
        self._eligible: list[int] = []  # heap of ready tickets below s + W
        self._beyond: list[int] = []  # heap of the other ready tickets

    def made(self, ticket: int) -> None:
        """A ticket exists now (or still, after a resume). Tickets are made in rising order."""
        self._next = ticket + 1
        self._unsettled.add(ticket)
        heapq.heappush(self._unsettled_heap, ticket)

    def resume_at(self, next_ticket: int) -> None:
        """Tickets below that were not made here are spent."""
        self._next = next_ticket
        self._advance()

    def oldest_unsettled(self) -> int:
        """s: the oldest ticket neither ready nor drawn; the next new one when all are."""
        heap = self._unsettled_heap
        while heap and heap[0] not in self._unsettled:
            heapq.heappop(heap)
        return heap[0] if heap else self._next

    @property
    def batch_ready(self) -> bool:
        return len(self._eligible) >= self.groups_per_batch

    @property
    def ready_groups(self) -> int:
        return len(self._eligible) + len(self._beyond)

    def ready(self, ticket: int) -> None:
        self._unsettled.remove(ticket)
        heapq.heappush(self._beyond, ticket)
        self._advance()

    def reopened(self, tickets: Iterable[int]) -> None:
        """Ready groups that are not ready any more; s may move back."""
        gone = set(tickets)
        self._beyond = [ticket for ticket in self._eligible + self._beyond if ticket not in gone]
        self._eligible = []
        heapq.heapify(self._beyond)
        for ticket in gone:
            self._unsettled.add(ticket)
            heapq.heappush(self._unsettled_heap, ticket)
        self._advance()

    def draw(self) -> list[int]:
        """The next batch's tickets, lowest first. Call only when `batch_ready`."""
        return [heapq.heappop(self._eligible) for _ in range(self.groups_per_batch)]

    def _advance(self) -> None:
        end = self.oldest_unsettled() + self.window
        while self._beyond and self._beyond[0] < end:
            heapq.heappush(self._eligible, heapq.heappop(self._beyond))

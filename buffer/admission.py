"""Admission: which ticket may be leased to which node, and which one is next.

Ticket n is the place of a group in the run: 0, 1, 2, ... below steps * B. Admission alone, with the order in which
tickets are drawn (buffer.order), keeps the staleness bound; nothing that happens later can break it, because every
token of a lease is at least as new as the version the node attested when the lease was granted.
"""

from __future__ import annotations

import heapq


def may_lease(ticket: int, node_version: int, lead: int, groups_per_batch: int) -> bool:
    """Whether a node that attested `node_version` may be given `ticket`, first or again: n < (v + 1 + K_a) * B.

    The guarantee: v >= floor(n / B) - K_a for every lease. It is the node's own version and never the trainer's: a
    node whose push is still under way would otherwise sample a ticket under an older policy than was counted on."""
    return ticket < (node_version + 1 + lead) * groups_per_batch


def least_version(ticket: int, lead: int, groups_per_batch: int) -> int:
    """The oldest version under which `ticket` may be leased; in a deterministic run the only one. A node that may have
    the ticket is at least as new, so it can be pinned to it."""
    return max(0, ticket // groups_per_batch - lead)


class TicketQueue:
    """Tickets that may be leased, lowest first: those opened again before a new one is made.

    Opened again is always below `next_ticket`, so the lowest is the top of the heap, else the next new ticket. An
    opened ticket leaves only by `take`; each operation costs O(log open)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.next_ticket = 0
        self._open: set[int] = set()
        self._heap: list[int] = []

    def lowest(self) -> int | None:
        if self._heap:
            return self._heap[0]
        return self.next_ticket if self.next_ticket < self.total else None

    def take(self) -> int:
        """Remove the lowest, or make the next one. Call only when `lowest` is not None."""
        if self._heap:
            ticket = heapq.heappop(self._heap)
            self._open.remove(ticket)
            return ticket
        self.next_ticket += 1
        return self.next_ticket - 1

    def reopen(self, ticket: int) -> None:
        """Samples of `ticket` are missing (again); calling twice is the same as once."""
        if ticket not in self._open:
            self._open.add(ticket)
            heapq.heappush(self._heap, ticket)

    def is_open(self, ticket: int) -> bool:
        return ticket in self._open or ticket >= self.next_ticket

    def close(self) -> None:
        """Nothing is leased any more."""
        self._open.clear()
        self._heap.clear()
        self.total = self.next_ticket

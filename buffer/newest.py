"""The order `fresh`: the newest ready groups, whatever their tickets.

Newest is the group whose oldest token is of the highest version; of equals the lowest ticket, which has waited longest.

The bound. K_a = K. What is passed over grows older, and no place in the order saves it from that. So the bound is kept
by the sweep (buffer.groups): it runs whenever a batch is confirmed, and takes from the ready groups what would be older
than K in a step from the new version; a result that comes too late is not held at all. Whatever is drawn for version c
is thus at most K old, and the trainer looks again. The worst case is K itself: admission lets a node of version v
sample tickets below (v + 1 + K) * B, and when c reaches v + K those of them that are still here may be drawn.

What it costs: at most (K + 1) * B tickets are leased and not drawn, for n < (v_node + 1 + K) * B and v_node <= c. In
each step the B newest train, and of the K * B others those that stay behind until they are K + 1 versions old are
dropped as stale, and sampled again. `waste` in summary.json says how much that is, and `length_bias`
whether what trains is shorter than what was sampled: what is done early is newer. One ticket may be passed over again
and again, each time sampled anew.

No deadlock. A node of version c may lease (c + 1 + K) * B tickets, c * B are drawn, so at least B of these are not: as
soon as B are ready there is a batch, and nothing else is waited for. The lowest ticket that is not ready is leased
first, also without credit (buffer.capacity).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from buffer.order import Order
from buffer.rules import ENDLESS


class NewestFirst(Order):
    """As an order with an endless window, in which all that is ready is eligible; but another choice. `draw` costs
    O(ready): at most (K + 1) * B."""

    def __init__(self, groups_per_batch: int) -> None:
        super().__init__(groups_per_batch, ENDLESS)
        self._versions: dict[int, int] = {}  # of the ready groups: that of the oldest token

    def ready(self, ticket: int, oldest_version: int = 0) -> None:
        self._versions[ticket] = oldest_version
        super().ready(ticket)

    def reopened(self, tickets: Iterable[int]) -> None:
        gone = set(tickets)
        for ticket in gone:
            del self._versions[ticket]
        super().reopened(gone)

    def draw(self) -> list[int]:
        """The next batch's tickets, rising. Call only when `batch_ready`."""
        versions = self._versions
        batch = heapq.nsmallest(self.groups_per_batch, versions, key=lambda ticket: (-versions[ticket], ticket))
        for ticket in batch:
            del versions[ticket]
        self._passed = deque([ticket for ticket in self._passed if ticket in versions])
        self._overtaking = sorted([ticket for ticket in self._overtaking if ticket in versions])  # and so a heap
        return sorted(batch)

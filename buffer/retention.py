"""Which segments of the journal may be deleted: those that hold nothing which anybody can still ask for.

A payload is needed until its group's batch is covered by a checkpoint: before the batch is lent it waits here, and
after that a trainer which starts again from an older checkpoint is lent the same batch once more. So a closed segment
goes when every ticket that was unspent when it was closed has been spent since, and a checkpoint covers the batches
confirmed until then. With reuse (buffer.reuse) a ticket counts as unspent until its group can be used no more,
and one whose attempts were all dropped as too old counts anew from what is sampled for it next.
Segments go from the oldest on: the state that the next one begins with takes their place.

A pure state machine; the recovery plays it through like the rules themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class _Closed:
    """A closed segment: the unspent tickets of that moment that are still unspent, and how many batches had been
    confirmed when the last of them was."""

    __slots__ = ("confirmed", "number", "tickets")

    def __init__(self, number: int, tickets: set[int], confirmed: int) -> None:
        self.number = number
        self.tickets = tickets
        self.confirmed = confirmed


class Retention:
    def __init__(self) -> None:
        self._closed: deque[_Closed] = deque()

    def closed(self, number: int, unspent: Iterable[int], confirmed: int) -> None:
        """A segment was closed, with these tickets unspent and so many batches confirmed."""
        self._closed.append(_Closed(number, set(unspent), confirmed))

    def confirmed(self, spent: Iterable[int], confirmed: int) -> None:
        """A batch was confirmed, the `confirmed`-th, and spent these tickets, or left nothing of them."""
        gone = set(spent)
        for segment in self._closed:
            if segment.tickets:
                segment.tickets -= gone
                if not segment.tickets:
                    segment.confirmed = confirmed

    def covered(self, version: int) -> list[int]:
        """A checkpoint covers every batch below `version`: the segments that nobody needs any more, oldest first."""
        gone = []
        while self._closed and not self._closed[0].tickets and self._closed[0].confirmed <= version:
            gone.append(self._closed.popleft().number)
        return gone

    @property
    def needed(self) -> set[int]:
        """The closed segments that may not be deleted yet."""
        return {segment.number for segment in self._closed}

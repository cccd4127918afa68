"""The order `replay`: a batch is F = ceil(B / R) fresh groups, in the order of their tickets, and up to B - F groups
that were trained before, each in at most R batches in all, as long as the staleness rule lets it train.

Whatever is used again is judged as at first: against the log-probabilities it was sampled with, and by the age of its
tokens now. Its attempts were trained once and stay so in the ledger; what is done again is counted beside it.

The choice. Of those that may be used again each is drawn with a chance that falls with its age, the weight being
1 / (1 + age), without replacement: of the keys -ln(u) / weight the smallest (Efraimidis and Spirakis, Weighted random
sampling with a reservoir, 2006), u from a hash of run seed, batch and ticket. So the journal gives the same choice.

The bound. Tickets are counted in F: n < (v_node + 1 + K_a) * F, and fifo puts ticket n into batch floor(n / F). As in
buffer.order its tokens are then at most K_a = K - (R - 1) old. In the R - 1 batches that follow they are at most K old:
whatever was trained at first may be used R times, if it is chosen. After that it may while the rule allows; what would
be more than K old in the next batch leaves the pool when a batch is confirmed, so nothing that is lent is
older than K, and the trainer looks again.

The size. No group is used twice in a batch, so j batches after its first one a group was used at most j times: all
F * min(b, R - 1) groups of the R - 1 batches before batch b may still be used (unless the trainer refused them). And
B - F <= (R - 1) * F. So batch b has at least min(B, F * (1 + min(b, R - 1))) groups: only the first R - 1 batches are
smaller, and after a resume without the journal the first again. F are waited for, the others are not: no deadlock
beyond those of buffer.order, whose proof it is with F for B.

The room. A token of a group that was first drawn in batch b is of version b or older, so it leaves before batch
b + K + 1: the pool never holds more than K * F groups. They count against the capacity from the time they are lent: it
has to have room for them, the F of the batch that is lent, and those of the next one (async_rl.config.batch_bytes).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import KeysView, Mapping, Sequence
from typing import TYPE_CHECKING

from async_rl.version import is_stale, staleness
from async_rl.wire.messages import Outcome
from buffer.leases import derive, samples_of

if TYPE_CHECKING:
    from buffer.groups import Group

SHORT = "short_batches"
SPAN = 1 << 63  # of `derive`


def age_weight(age: int) -> float:
    """How likely a group of this age is used again, against one of age 0."""
    return 1.0 / (1.0 + age)


def uniform(text: str) -> float:
    """In (0, 1], from a text."""
    return (derive(text) + 1) / SPAN


def choose(ages: Mapping[int, int], count: int, seed: int, batch: int) -> list[int]:
    """`count` of these tickets (all, when there are fewer), by the weights of their ages, rising."""

    def key(ticket: int) -> tuple[float, int]:
        return -math.log(uniform(f"reuse/{seed}/{batch}/{ticket}")) / age_weight(ages[ticket]), ticket

    return sorted(heapq.nsmallest(count, ages, key=key))


class Kept:
    """A group that may be used again: in how many batches it was, and the version of its oldest token."""

    __slots__ = ("group", "oldest", "uses")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.uses = 1
        self.oldest = min(held.oldest for record in group.leases for held in record.held)


class Pool:
    """All groups that may be used again, by ticket, in the order in which they were first trained."""

    def __init__(self, seed: int, reuse: int, max_staleness: int) -> None:
        self._seed = seed
        self._reuse = reuse
        self._max_staleness = max_staleness
        self._kept: dict[int, Kept] = {}
        self.counts: Counter[str] = Counter()
        """Attempts that were lent again and confirmed, by outcome; and the batches that were smaller than B."""

    @property
    def tickets(self) -> KeysView[int]:
        return self._kept.keys()

    def uses(self, ticket: int) -> int:
        """In how many confirmed batches the group was."""
        kept = self._kept.get(ticket)
        return 0 if kept is None else kept.uses

    def draw(self, version: int, room: int) -> list[Group]:
        """Up to `room` groups for the batch of this version. All in the pool may train in it: see `confirmed`."""
        ages = {ticket: staleness(version, kept.oldest) for ticket, kept in self._kept.items()}
        return [self._kept[ticket].group for ticket in choose(ages, room, self._seed, version)] if room > 0 else []

    def confirmed(self, lent: Sequence[Group], trained: Mapping[int, int], version: int) -> list[Group]:
        """A batch is confirmed, and the next one is of `version`; `trained` is a mask of samples for each lease. Keeps
        what may be used again, and returns the groups of batch and pool that may not."""
        released = []
        for group in lent:
            kept = self._kept.get(group.ticket)
            if only_trained(group, trained):
                if kept is None:
                    self._kept[group.ticket] = Kept(group)
                else:
                    kept.uses += 1
            elif kept is None:
                released.append(group)
            else:
                kept.uses = self._reuse
        for ticket, kept in list(self._kept.items()):
            if kept.uses >= self._reuse or is_stale(version, kept.oldest, self._max_staleness):
                released.append(self._kept.pop(ticket).group)
        return released

    def close(self) -> None:
        """The run is over: nothing is used again."""
        self._kept.clear()

    def count(self, outcome: Outcome, attempts: int) -> None:
        self.counts[outcome] += attempts


def only_trained(group: Group, trained: Mapping[int, int]) -> bool:
    """Forget a group's attempts that the trainer did not take; whether enough is left to compare with each other. (Each
    is held for itself: with reuse no bundle is kept, see buffer.bundled.is_plain.)"""
    before = sum([len(record.held) for record in group.leases])
    for record in group.leases:
        mask = trained.get(record.lease, 0)
        record.held = tuple([held for held in record.held if mask & held.samples])
    left = sum([len(record.held) for record in group.leases])
    return left >= min(2, before) and left > 0


def lent_again(group: Group) -> dict[int, int]:
    """The attempts of a group that is used again: a mask of samples for each lease."""
    return {record.lease: samples_of(record.held) for record in group.leases if record.held}

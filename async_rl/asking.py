"""Where a node asks for work when the buffer has several shards: a pure rule, of the nodes and of the simulator.

A node wants to have been given `total` samples by now: those it is done with, and as many more as it wants to hold.
What it lacks it asks for in whole groups, each of one shard alone, going round from its home. A shard that has no more
for it says so and forgets it (`once`), and the next one is asked. So no demand is with two shards at a time, and a node
is never given more than one buffer would give it: less than a group beyond what it wants.

    lacks k groups ─> asks the next k shards, once each ─> granted │ refused: the next ones ... LOOKS shards in a row
                                  ^                                                                   │
                                  └── after a while: asks these once more, which takes back ─── stands at the next ones

When LOOKS shards in a row had nothing, the node leaves its demand with those that are next (it `stands` there): these
have it as one buffer would, and grant as soon as a ticket is open to it. Tickets may open elsewhere meanwhile (another
node died, a newer policy serves), so if it does not stand at all of them it looks at the next ones after TURN_FIRST_S,
and from then on every TURN_LATER_S; a grant, or a newer policy, begins anew. So what any shard has is found within
N / LOOKS turns, and how many messages a starved node sends does not depend on how many nodes there are.

A shard that does not answer within SILENT_S has its demand counted no more: the others are asked for it, and when it
answers after all the node has so much more than it wants, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

LOOKS = 2
TURN_FIRST_S = 0.5
TURN_LATER_S = 4.0
SILENT_S = 2.0


class Ask(NamedTuple):
    """To be sent to one shard: NodeWants(total_samples, once)."""

    shard: int
    total_samples: int
    once: bool


class _State(Enum):
    IDLE = 0  # nothing is asked of it
    ASKED = 1  # once: it grants or refuses
    STANDS = 2  # it grants when it can
    SILENT = 3  # asked, and not counted any more


class _Shard:
    """`given` are the training samples that it has granted, as the node knows; `told` as the shard does; `asked` is the
    total that it was asked for last."""

    __slots__ = ("asked", "given", "since", "state", "told")

    def __init__(self) -> None:
        self.given = self.told = self.asked = 0
        self.state = _State.IDLE
        self.since = 0.0

    @property
    def outstanding(self) -> int:
        return max(0, self.asked - self.told) if self.state in (_State.ASKED, _State.STANDS) else 0


class Asking:
    """Of one node. Times are in seconds, monotonic."""

    def __init__(self, shards: int, group_size: int, home: int = 0) -> None:
        self._group_size = group_size
        self._shards = [_Shard() for _ in range(shards)]
        self._given = self._outstanding = self._standing = 0  # of all shards
        self._idle = shards
        self._next = home
        self._refusals = 0  # in a row, of shards
        self._patience = TURN_FIRST_S
        self._turn_at = math.inf

    @property
    def turn_at(self) -> float:
        """When to ask `turn`; inf while the node stands nowhere."""
        return self._turn_at

    def given(self, shard: int) -> int:
        """Training samples that the shard has granted so far."""
        return self._shards[shard].given

    @property
    def outstanding(self) -> int:
        """Samples that are asked for and not granted."""
        return self._outstanding

    def waits_at(self, shard: int) -> bool:
        """Whether the shard may grant something without being asked again."""
        return self._shards[shard].state is not _State.IDLE

    def lacks(self, total: int) -> int:
        return total - self._given - self._outstanding

    # --- what to ask -------------------------------------------------------------------------------------------------

    def wants(self, total: int, now: float) -> list[Ask]:
        """What to ask for, so that `total` samples have been given in all. One buffer hears the total, and keeps it."""
        if len(self._shards) == 1:
            return self._wants_of_one(total)
        self._give_up_silent(now)
        groups = math.ceil(self.lacks(total) / self._group_size)
        stands = self._refusals >= min(LOOKS, len(self._shards))
        asks = [self._ask(number, count, stands, now) for number, count in self._spread(groups)] if groups > 0 else []
        self._plan_turn(now)
        return asks

    def _plan_turn(self, now: float) -> None:
        """Who stands somewhere and not everywhere will look around."""
        if self._turn_at == math.inf and self._standing and self._idle:
            self._turn_at = now + self._patience
            self._patience = TURN_LATER_S

    def repeat(self) -> Ask:
        """What the first shard knows already, for the numbers that go with it."""
        shard = self._shards[0]
        return Ask(0, shard.asked if len(self._shards) == 1 else shard.given, once=False)

    def turn(self, now: float) -> list[Ask]:
        """Where the node stands it asks once more; what is refused there it will look for elsewhere."""
        if now < self._turn_at:
            return []
        self._turn_at, self._refusals = math.inf, 0
        asks = []
        for number, shard in enumerate(self._shards):
            if shard.state is _State.STANDS:
                self._now(shard, _State.ASKED, shard.asked, now)
                asks.append(Ask(number, shard.asked, once=True))
        return asks

    def _wants_of_one(self, total: int) -> list[Ask]:
        (shard,) = self._shards
        if total <= shard.asked:
            return []
        self._now(shard, _State.STANDS, total, 0.0)
        return [Ask(0, total, once=False)]

    def _spread(self, groups: int) -> Iterator[tuple[int, int]]:
        """So many groups over the shards that are asked for nothing, from the next one on."""
        count = len(self._shards)
        round_trip = [(self._next + step) % count for step in range(count)]
        free = [number for number in round_trip if self._shards[number].state is _State.IDLE][:groups]
        for place, number in enumerate(free):
            yield number, groups // len(free) + (place < groups % len(free))

    def _ask(self, number: int, groups: int, stands: bool, now: float) -> Ask:
        shard = self._shards[number]
        asked = shard.told + groups * self._group_size
        self._now(shard, _State.STANDS if stands else _State.ASKED, asked, now)
        self._next = (number + 1) % len(self._shards)
        return Ask(number, shard.asked, once=not stands)

    def _give_up_silent(self, now: float) -> None:
        for shard in self._shards:
            if shard.state is _State.ASKED and now - shard.since > SILENT_S:
                self._now(shard, _State.SILENT, shard.asked, now)

    def _now(self, shard: _Shard, state: _State, asked: int, now: float) -> None:
        self._count(shard, -1)
        shard.state, shard.asked, shard.since = state, asked, now
        self._count(shard, +1)

    def _count(self, shard: _Shard, sign: int) -> None:
        self._outstanding += sign * shard.outstanding
        self._standing += sign * (shard.state is _State.STANDS)
        self._idle += sign * (shard.state is _State.IDLE)

    # --- what is heard -----------------------------------------------------------------------------------------------

    def granted(self, number: int, samples: int) -> None:
        shard = self._shards[number]
        if shard.state is _State.STANDS:
            self._next = number  # where something has opened there may be more
        self._hears(shard, shard.given + samples, shard.told + samples)
        self._begin_anew()

    def refused(self, number: int, told: int) -> None:
        """The shard has nothing more now, and has granted `told` samples as it counts."""
        shard = self._shards[number]
        self._hears(shard, shard.given, told, over=True)
        self._refusals += 1

    def flipped(self, now: float) -> None:
        """A newer policy serves: tickets are open to this node that were not."""
        self._begin_anew()
        if self._turn_at < math.inf:
            self._turn_at = now + TURN_FIRST_S

    def restarted(self, number: int) -> None:
        """The shard knows nothing of what it was asked for."""
        shard = self._shards[number]
        self._hears(shard, shard.given, shard.given, over=True)

    def _hears(self, shard: _Shard, given: int, told: int, over: bool = False) -> None:
        self._given += given - shard.given
        self._count(shard, -1)
        shard.given, shard.told = given, told
        if over or told >= shard.asked:
            shard.state = _State.IDLE
        self._count(shard, +1)

    def _begin_anew(self) -> None:
        self._refusals, self._patience = 0, TURN_FIRST_S

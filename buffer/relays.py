"""Who pulls a policy's file from whom: from the store, or from a node that has asked for it before and relays.

A tree for every file, in the order in which nodes ask, so that none waits for one that is asleep: a source has begun to
pull before those that pull from it, and passes each chunk on as soon as it has verified it. At most `fanout` pull from
one source at once, from the store likewise while there are relays. With fanout 2, all of them volunteers:

    store ─┬─ a ─┬─ c        a, b ask first; then c, d, e, f; g would be c's.
           │     └─ d        g asks late, when all have theirs: any of them is as good as the store, and the store's
           └─ b ─┬─ e        upload stays two copies.
                 └─ f

Who finds no room waits for some, at most `timeout_s`: then the store serves it all the same. Who reports its source
(silent, unreachable, without the file, or with wrong bytes) gets another, and after LAST_TRY of them the store, which
ends every search. A relay that somebody calls silent gets no new children for that file; one of which REPORTERS
nodes say that its bytes were wrong gets none for any file. One report bans it for its reporter alone: else one hostile
node could take every relay out of service.

A pure state machine. What enforces that no altered byte is used are the digests, which every node checks against the
store's; all this saves the store's upload, and waits.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from async_rl.version import PolicyId
from async_rl.wire.messages import RELAY_KEEPS, Trouble
from async_rl.wire.security import is_local

STORE = ""
LAST_TRY = 2
REPORTERS = 2
# Times the median of those that are done, and so many time-outs: then the store takes a straggler over. One time-out is
# what its relay's death, or that of one above, may have cost.
SLOW_FACTOR, SLOW_TIMEOUTS = 2.0, 2

Bypass = Literal["silent", "unreachable", "gone", "damaged", "slow", "lost"]


class Grant(NamedTuple):
    """`node` pulls the file of `policy` from `source` from now on: a relay's name, or STORE."""

    node: str
    policy: PolicyId
    source: str


class _Node:
    """`place` and `endpoint` as in NodeRelay; `local`: it is for its own place alone; `recent` are the files that it
    asked for last and so still has; `banned` the relays that it cannot reach or got wrong bytes of."""

    __slots__ = ("banned", "endpoint", "local", "lost", "place", "recent")

    def __init__(self, place: str, endpoint: str) -> None:
        self.place = place
        self.endpoint = endpoint
        self.local = is_local(endpoint)
        self.lost = False  # the store does not hear it
        self.recent: deque[PolicyId] = deque(maxlen=RELAY_KEEPS)
        self.banned: set[str] = set()


class _Pull:
    """A node's pull of one file. `source` is None while it waits for room, until `due`."""

    __slots__ = ("asked", "done", "due", "had", "left", "source")

    def __init__(self, now: float, due: float) -> None:
        self.source: str | None = None
        self.asked = now
        self.due = due
        self.done: float | None = None
        self.had: set[str] = set()  # sources that it was given
        self.left: set[str] = set()  # those of them that it is not given again


class _Tree:
    """All pulls of one file, in the order of asking; `silent` are relays that get no new children here; `copies` is how
    often the store was named."""

    __slots__ = ("copies", "pulls", "silent")

    def __init__(self) -> None:
        self.copies = 0
        self.pulls: dict[str, _Pull] = {}
        self.silent: set[str] = set()

    def children(self, source: str) -> list[str]:
        """Who pulls from it at this moment."""
        return [node for node, pull in self.pulls.items() if pull.source == source and pull.done is None]

    def load(self) -> Counter[str]:
        """How many pull from each source at this moment."""
        return Counter(
            pull.source for pull in self.pulls.values() if pull.source is not None and pull.done is None
        )

    def depth(self, node: str) -> int:
        """Sources between a node and the store; 0 for whom the store serves, and for who has the whole file."""
        steps, source = 0, self.pulls[node].source
        while source and self.pulls[node].done is None:
            steps, node = steps + 1, source
            source = self.pulls[node].source if node in self.pulls else STORE
        return steps

    def leads_to(self, node: str, below: str) -> bool:
        """Whether what `node` has not got yet comes by way of `below`."""
        at: str | None = node
        while at and at in self.pulls and self.pulls[at].done is None:
            if at == below:
                return True
            at = self.pulls[at].source
        return at == below


class _Room:
    """Who may be pulled from, looked up once for all who wait (else what a push to a thousand nodes costs the store
    rises with their cube): how many pull from each, the `relays` of the file, and the fewest that any source has;
    `to_come`: a volunteer has not asked yet."""

    __slots__ = ("least", "load", "relays", "to_come", "volunteers")

    def __init__(self, load: Counter[str], relays: list[str], volunteers: bool, to_come: bool) -> None:
        self.load, self.relays, self.volunteers, self.to_come = load, relays, volunteers, to_come
        self.least = min(load[source] for source in (STORE, *relays))

    def taken(self, source: str, relay: str | None) -> None:
        """One more pulls from `source`, and passes it on as `relay` itself."""
        self.load[source] += 1
        if relay is not None:
            self.relays.append(relay)
        self.least = min(self.load[source] for source in (STORE, *self.relays))


class Relays:
    """`timeout_s` on the clock of `now`, whatever that is."""

    def __init__(self, fanout: int, timeout_s: float) -> None:
        self._fanout = fanout
        self._timeout_s = timeout_s
        self._nodes: dict[str, _Node] = {}
        self._trees: dict[PolicyId, _Tree] = {}
        self._liars: dict[str, set[str]] = {}  # relay to those who said so; until it introduces itself anew
        self.bypasses: Counter[Bypass] = Counter()

    # --- who is here -------------------------------------------------------------------------------------------------

    @property
    def volunteers(self) -> list[str]:
        """Nodes that relay, but for those that were found to send wrong bytes."""
        return [
            name for name, node in self._nodes.items() if node.endpoint and not node.lost and not self._lies(name)
        ]

    @property
    def names(self) -> list[str]:
        """Of all nodes that are known."""
        return list(self._nodes)

    @property
    def liars(self) -> list[str]:
        """Relays that several nodes had wrong bytes of."""
        return [name for name in self._liars if self._lies(name)]

    def endpoint(self, relay: str) -> str:
        return self._nodes[relay].endpoint

    def joined(self, name: str, place: str, endpoint: str) -> None:
        """A node has introduced itself, perhaps anew: it has none of the files that it had before, and nothing of
        before is held against it."""
        self._nodes[name] = _Node(place, endpoint)
        self._liars.pop(name, None)
        for other in self._nodes.values():
            other.banned.discard(name)

    def lost(self, name: str, now: float) -> list[Grant]:
        """The store does not hear a node any more: who pulls from it gets another source, without having to notice
        first."""
        if name not in self._nodes:
            return []
        self._nodes[name].lost = True
        return self._moved_away(name, "lost", now)

    def back(self, name: str) -> None:
        """It was lost for a moment only, and is the same."""
        if name in self._nodes:
            self._nodes[name].lost = False

    def left(self, name: str, now: float) -> list[Grant]:
        """A node is gone for good."""
        self._nodes.pop(name, None)
        grants = []
        for policy, tree in self._trees.items():
            if tree.pulls.pop(name, None) is not None:
                grants += self._admit(policy, now)
        return grants + self._moved_away(name, "lost", now)

    def forget(self, kept: Iterable[PolicyId]) -> None:
        """Files that the store has no more are nobody's to pull."""
        stay = set(kept)
        self._trees = {policy: tree for policy, tree in self._trees.items() if policy in stay}

    def replaced(self, policy: PolicyId) -> None:
        """Its file is another one: who has the first has nothing to pass on."""
        self._trees.pop(policy, None)
        for node in self._nodes.values():
            if policy in node.recent:
                node.recent.remove(policy)

    # --- pulls -------------------------------------------------------------------------------------------------------

    def ask(
        self, name: str, policy: PolicyId, now: float, failed: str = STORE, trouble: Trouble = "silent"
    ) -> list[Grant]:
        """A node wants a file, or another source for it than the one that `failed`. What it pulled before it pulls no
        more: it does so one at a time. No grant for it: it waits for room."""
        node = self._nodes.setdefault(name, _Node("", ""))
        grants = self._stop(name, policy, now)
        tree = self._trees.setdefault(policy, _Tree())
        pull = tree.pulls.get(name)
        if pull is None or not failed:
            tree.pulls.pop(name, None)  # behind those that have asked meanwhile
            pull = tree.pulls[name] = _Pull(now, now + self._timeout_s)
        if policy in node.recent:
            node.recent.remove(policy)
        node.recent.append(policy)
        before, pull.source, pull.done = pull.source, None, None
        if failed in pull.had and failed in self._nodes:  # of one that it never had it can say nothing
            grants += self._reported(name, policy, failed, trouble, now)
            if before != failed:  # it has been moved meanwhile
                pull.source = before
                grants += [Grant(name, policy, before)] if before is not None else []
        return grants + self._admit(policy, now)

    def pulled(self, name: str, policy: PolicyId, now: float) -> list[Grant]:
        """A node has the whole file: there is room for another where it got it, and with itself."""
        tree = self._trees.get(policy)
        if tree is None or name not in tree.pulls:
            return []
        tree.pulls[name].done = now
        return self._admit(policy, now)

    def tick(self, now: float) -> list[Grant]:
        """Who has waited for long enough is served by the store, and so are stragglers below a slow relay."""
        grants = []
        for policy, tree in self._trees.items():
            for name, pull in tree.pulls.items():
                if pull.source is None and pull.done is None and now >= pull.due:
                    grants.append(self._give(name, policy, STORE, now))
            grants += self._stragglers(policy, tree, now)
        return grants

    def source(self, name: str, policy: PolicyId) -> str | None:
        """From whom a node pulls, or pulled; None while it waits, or for who has not asked."""
        tree = self._trees.get(policy)
        return tree.pulls[name].source if tree is not None and name in tree.pulls else None

    # --- the rules ---------------------------------------------------------------------------------------------------

    def _admit(self, policy: PolicyId, now: float) -> list[Grant]:
        """A source for everyone who waits, as far as there is room; volunteers first, since each makes more of it."""
        tree = self._trees[policy]
        waiting = [name for name, pull in tree.pulls.items() if pull.source is None and pull.done is None]
        if not waiting:
            return []
        room = self._room(policy, tree)
        grants = []
        for name in sorted(waiting, key=lambda name: not self._nodes[name].endpoint):
            source = self._best(name, tree, room)
            if source is not None:
                grants.append(self._give(name, policy, source, now))
                room.taken(source, name if self._passes_on(name, policy, tree) else None)
        return grants

    def _give(self, name: str, policy: PolicyId, source: str, now: float) -> Grant:
        tree = self._trees[policy]
        pull = tree.pulls[name]
        pull.source, pull.asked = source, now
        tree.copies += source == STORE
        pull.had.add(source)
        return Grant(name, policy, source)

    def _best(self, name: str, tree: _Tree, room: _Room) -> str | None:
        """The store for the first few; after them a relay that has the whole file, or the one nearest to the store,
        and of equals the one with the fewest children; the store again when no relay has room. None: nor has it."""
        pull, load = tree.pulls[name], room.load
        if len(pull.left) >= LAST_TRY or not room.volunteers:
            return STORE
        # One place at each source is kept for a volunteer, which makes room for others, while one has not asked yet.
        limit = self._fanout - (room.to_come and not self._nodes[name].endpoint)
        if room.least >= limit:
            return STORE if pull.left else None  # who left one has waited for a time-out already
        sources = [
            (tree.depth(relay), load[relay], relay)
            for relay in room.relays
            if load[relay] < limit and self._may_pull(name, relay, tree)
        ]
        whole = [source for source in sources if tree.pulls[source[2]].done is not None]
        free = load[STORE] < limit
        if free and not whole and tree.copies < limit:
            return STORE
        if sources:
            return min(whole or sources)[2]
        return STORE if free or pull.left else None

    def _room(self, policy: PolicyId, tree: _Tree) -> _Room:
        volunteers = self.volunteers
        to_come = any(relay not in tree.pulls for relay in volunteers)
        relays = [relay for relay in tree.pulls if self._passes_on(relay, policy, tree)]
        return _Room(tree.load(), relays, bool(volunteers), to_come)

    def _passes_on(self, relay: str, policy: PolicyId, tree: _Tree) -> bool:
        """Whether it may have children for this file."""
        node = self._nodes.get(relay)
        return (
            node is not None
            and node.endpoint != ""
            and not node.lost
            and tree.pulls[relay].source is not None
            and policy in node.recent
            and relay not in tree.silent
            and not self._lies(relay)
        )

    def _may_pull(self, name: str, relay: str, tree: _Tree) -> bool:
        """Whether this node may be its child, as far as only the two are concerned."""
        node, other = self._nodes[name], self._nodes[relay]
        return (
            relay != name
            and relay not in node.banned
            and relay not in tree.pulls[name].left
            and (not other.local or node.place == other.place)
            and not tree.leads_to(relay, name)
        )

    def _reported(self, name: str, policy: PolicyId, relay: str, trouble: Trouble, now: float) -> list[Grant]:
        """What a node says of the source that it had."""
        tree = self._trees[policy]
        self.bypasses[trouble] += 1
        tree.pulls[name].left.add(relay)
        if trouble in ("silent", "unreachable", "gone"):
            tree.silent.add(relay)
        if trouble in ("unreachable", "damaged"):
            self._nodes[name].banned.add(relay)
        if trouble != "damaged" or self._lies(relay):
            return []
        self._liars.setdefault(relay, set()).add(name)
        return self._moved_away(relay, "damaged", now) if self._lies(relay) else []

    def _lies(self, relay: str) -> bool:
        return len(self._liars.get(relay, ())) >= REPORTERS

    def _moved_away(self, relay: str, why: Bypass, now: float) -> list[Grant]:
        """Who pulls from it gets another source at once."""
        grants = []
        for policy, tree in self._trees.items():
            children = tree.children(relay)
            for name in children:
                pull = tree.pulls[name]
                pull.left.add(relay)
                pull.source = None
                self.bypasses[why] += 1
            if children:
                grants += self._admit(policy, now)
        return grants

    def _stop(self, name: str, policy: PolicyId, now: float) -> list[Grant]:
        """It asks for another file: what it had of the others is not to be had of it, unless it is whole."""
        grants = []
        for other, tree in self._trees.items():
            pull = tree.pulls.get(name)
            if other != policy and pull is not None and pull.done is None:
                del tree.pulls[name]
                grants += self._admit(other, now)
        return grants

    def _stragglers(self, policy: PolicyId, tree: _Tree, now: float) -> list[Grant]:
        """Half have the file, and one below a relay is far slower than they were: its relay, or one above, is slow or
        plays for time, which no time-out for a chunk can tell from a slow network."""
        took = [pull.done - pull.asked for pull in tree.pulls.values() if pull.done is not None]
        if 2 * len(took) < len(tree.pulls) or len(took) == len(tree.pulls):
            return []
        limit = SLOW_FACTOR * statistics.median(took) + SLOW_TIMEOUTS * self._timeout_s
        free = self._fanout - tree.load()[STORE]
        slow = [
            name
            for name, pull in tree.pulls.items()
            if pull.source and pull.done is None and now - pull.asked > limit
        ]
        grants = [self._give(name, policy, STORE, now) for name in slow[: max(0, free)]]
        self.bypasses.update(["slow"] * len(grants))
        return grants

"""Hand-overs: what a draining node has begun goes on elsewhere, under the same attempt.

    held by a -- PrefixesHandedOver --> parked, held by nobody -- a node may have it --> held by b -- results
                                           |                                              |
                                           +-- its deadline, the end of the run           +-- handed over again, lost

A lease has one holder, so it goes over whole: what its node still owes of it and does not hand over is leased again.
The random state of an attempt is (seed, position), and both are in the lease and the prefix; so whoever goes on
samples what the first node would have, as long as the policy is the same.

The guarantee (see `may_take`) is that of admission: a node whose engine serves the lease's min_version or newer. The
choice among those (`best_of`) saves work: one that serves the policy of the prefix need not pull it, or do without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from async_rl.trajectory import EncodedTrajectory
from async_rl.version import VersionRun, tokens_of
from buffer.events import HandedPrefix, PrefixesHandedOver
from buffer.leases import EvalLease, LeaseRecord
from buffer.ledger import members
from buffer.nodes import Node
from buffer.results import is_proved

NOBODY = "no node yet (handed over)"  # the holder's name of what is parked, for people


class Parked(NamedTuple):
    lease: LeaseRecord
    prefixes: Mapping[int, HandedPrefix]  # by sample


class Handovers:
    """`counts` are of attempts: handed_over (each time), and mixed: those that went on under another policy."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.nobody = Node(NOBODY, 0, "gone")
        self.parked: dict[int, Parked] = {}
        self._begun: dict[int, dict[int, tuple[VersionRun, ...]]] = {}  # of the prefix, by lease and sample

    def park(self, lease: LeaseRecord, prefixes: Mapping[int, HandedPrefix]) -> Node:
        """Remember what a lease's new holder needs; returns who holds it until there is one."""
        self.parked[lease.lease] = Parked(lease, prefixes)
        self._begun[lease.lease] = {sample: prefix.versions for sample, prefix in prefixes.items()}
        self.counts["handed_over"] += len(prefixes)
        return self.nobody

    def placed(self, ready: Sequence[Node]) -> Iterator[tuple[LeaseRecord, tuple[EncodedTrajectory, ...], Node]]:
        """Parked leases that a node may have, oldest first, with the prefixes of their samples, and the node. The
        caller gives the lease to the node before it asks for the next. O(parked * nodes)."""
        for lease, prefixes in list(self.parked.values()):
            able = [node for node in ready if may_take(lease, node)]
            if able:
                del self.parked[lease.lease]
                newest = prefixes[min(prefixes)].versions[-1]
                yield lease, tuple([prefixes[sample].payload for sample in lease.samples]), best_of(able, newest)

    def arrived(self, lease: int, sample: int, versions: Sequence[VersionRun]) -> None:
        """A good result: did it change its policy where it changed hands?"""
        begun = self._begun.get(lease) if self._begun else None
        if begun is not None and sample in begun:
            self.counts["mixed"] += changes_at(versions, tokens_of(begun[sample]))

    def begun_under(self, lease: int, sample: int) -> Sequence[VersionRun]:
        """The policies of an attempt's prefix, for which the node that began it passed."""
        return self._begun[lease].get(sample, ()) if lease in self._begun else ()

    def closed(self, lease: int) -> None:
        """Nothing is owed under this lease any more."""
        if self._begun:
            self._begun.pop(lease, None)
            self.parked.pop(lease, None)


def may_take(lease: LeaseRecord, node: Node) -> bool:
    """Whether a ready node may go on with a lease: what it samples itself must not be older than was admitted."""
    return node.version >= lease.min_version


def best_of(nodes: Sequence[Node], policy: VersionRun) -> Node:
    """One that serves the policy of the newest token, else a node of the newest version; the idlest of these."""

    def rank(node: Node) -> tuple[bool, int, float]:
        serves_it = node.policy is not None and (node.version, node.policy.digest) == (policy.version, policy.digest)
        return not serves_it, -node.version, node.leased_samples / max(1, node.slots)

    return min(nodes, key=rank)


def sound_prefixes(event: PrefixesHandedOver, lease: LeaseRecord, earlier: Handovers) -> dict[int, HandedPrefix]:
    """The prefixes that may be gone on with, by sample: owed, unbroken, of policies that are new enough and for which
    its node passed, or whoever began it before that one.
    Evaluation is not handed over: it holds no ticket, and is asked again with the same seeds."""
    if isinstance(lease, EvalLease):
        return {}
    owed = set(members(lease.leased))
    sound = {
        prefix.sample: prefix
        for prefix in event.prefixes
        if prefix.sample in owed and not prefix.problem and prefix.versions and _believable(prefix, lease, earlier)
    }
    return {sample: sound[sample] for sample in sorted(sound)}


def _believable(prefix: HandedPrefix, lease: LeaseRecord, earlier: Handovers) -> bool:
    begun = earlier.begun_under(lease.lease, prefix.sample)
    return all(run.version >= lease.min_version and is_proved(run, lease.holder, begun) for run in prefix.versions)


def changes_at(versions: Sequence[VersionRun], position: int) -> bool:
    """Whether token `position` is of another policy than the one before it."""
    start = 0
    for before, run in pairwise(versions):
        start += before.count
        if start == position:
            return (before.version, before.digest) != (run.version, run.digest)
    return False

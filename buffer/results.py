"""Whether to believe a result or a confirmation: the gates before any state changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from async_rl.version import PolicyId, VersionRun, oldest_version
from async_rl.wire.messages import Disposition, Outcome
from buffer.events import ResultArrived
from buffer.leases import EvalLease, LeaseRecord, Leases
from buffer.ledger import members
from buffer.nodes import Node
from buffer.proofs import Proofs

Policies = Mapping[int, AbstractSet[str]]
"""Published digests by version, in the order in which the versions were published last; see `remember`."""


class Refusal(NamedTuple):
    """`kind` is counted, `reason` is for people."""

    kind: str
    reason: str


def remember(published: dict[int, set[str]], policy: PolicyId, kept: int) -> None:
    """Note a published policy, and forget the versions published before the last `kept`: who serves one of these is
    that far beyond the staleness bound, and gets no lease for what it samples."""
    digests = published.pop(policy.version, set())
    published[policy.version] = digests | {policy.digest}
    while len(published) > kept:
        del published[next(iter(published))]


def only_policy(published: Policies, version: int) -> PolicyId | None:
    """The policy of a version of which one digest was published; None when that is long ago."""
    digests = published.get(version)
    return PolicyId("main", version, min(digests)) if digests else None


def is_owed(event: ResultArrived, lease: LeaseRecord, owed: int) -> bool:
    """Whether the node that sends this result owes it, `owed` being the samples that the lease still does."""
    return event.sample >= 0 and owed >> event.sample & 1 == 1 and event.node == lease.holder.name


def why_not_owed(event: ResultArrived, lease: LeaseRecord | None, owed: int, leases: Leases) -> Refusal:
    """Why such a result changes nothing: the attempt is closed, was never issued, or is another node's."""
    if lease is None and not leases.was_issued(event.lease):
        return Refusal("unknown_attempt", "there is no such lease")
    if lease is None or event.sample not in members(owed):
        return Refusal("late", "this attempt is closed, or was never part of the lease")
    return Refusal("wrong_node", f"the lease is {lease.node}'s")


def is_proved(run: VersionRun, node: Node, begun: Sequence[VersionRun]) -> bool:
    """Whether a node may have sampled this: its engine attested the policy and passed for it (buffer.proofs), or the
    attempt came to it with such tokens, `begun` by a node that had passed."""
    key = (run.version, run.digest)
    return key in node.passed or any(key == (other.version, other.digest) for other in begun)


def why_refused(
    event: ResultArrived, lease: LeaseRecord, published: Policies, proofs: Proofs, begun: Sequence[VersionRun],
    exact: bool = False,
) -> Refusal | None:  # fmt: skip
    """Why an owed result must not train (or be evaluated); None when it may. Every token that trains is proved, as
    is every evaluated one where there are proofs. `exact`: and of the very version that the lease names."""
    if event.problem:
        return Refusal("problem", event.problem)
    if event.status != "ok":
        return None
    if not event.versions:
        return Refusal("nothing_sampled", "it has no sampled token")
    if isinstance(lease, EvalLease):
        pinned = (lease.policy.version, lease.policy.digest)
        if any((run.version, run.digest) != pinned for run in event.versions):
            return Refusal("wrong_policy", f"not evaluated under {lease.policy.short()}")
        if pinned not in lease.holder.passed and proofs.asks():
            return Refusal("unattested", f"{lease.node} has not shown that it holds {lease.policy.short()}")
        return None
    for run in event.versions:
        if not is_proved(run, lease.holder, begun):
            named = f"policy {run.version}-{run.digest[:8]}"
            if run.digest not in published.get(run.version, ()):
                return Refusal("unregistered", f"{named} was never published")
            return Refusal("unattested", f"{named}, which {lease.node} has not attested")
        if run.version < lease.min_version:
            oldest = oldest_version(event.versions)
            return Refusal("too_old", f"sampled under version {oldest}, leased for {lease.min_version} or newer")
        if exact and run.version != lease.min_version:
            return Refusal(
                "wrong_policy", f"sampled under version {run.version}, leased for exactly {lease.min_version}"
            )
    return None


def sort_dispositions(
    dispositions: Sequence[Disposition], lent: Mapping[int, int]
) -> tuple[str, dict[Outcome, dict[int, int]]]:
    """What is wrong when dispositions do not name exactly the lent attempts, once each (empty when they do), and the
    attempts by outcome. `lent`, and what is returned for each outcome, is a mask of samples for each lease."""
    ends: dict[Outcome, dict[int, int]] = {}
    left = dict(lent)
    for item in dispositions:
        lease, mask = item.lease, left.get(item.lease, 0)
        if not item.samples:
            return f"lease {lease} is named without a sample", {}
        named = 0
        for sample in item.samples:
            if sample < 0 or not mask >> sample & 1:
                fault = "is named twice" if sample >= 0 and lent.get(lease, 0) >> sample & 1 else "is not in it"
                return f"attempt {lease}/{sample} {fault}", {}
            mask ^= 1 << sample
            named |= 1 << sample
        left[lease] = mask
        leases = ends.setdefault(item.outcome, {})
        leases[lease] = leases.get(lease, 0) | named
    missing = next(((lease, members(mask)) for lease, mask in left.items() if mask), None)
    if missing is not None:
        return f"attempt {missing[0]}/{missing[1][0]} is missing", {}
    return "", ends

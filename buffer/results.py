"""Whether to believe a result or a confirmation: the gates before any state changes."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from async_rl.version import oldest_version
from async_rl.wire.messages import Disposition
from buffer.events import ResultArrived
from buffer.leases import Leases, OpenLease


class Refusal(NamedTuple):
    """`kind` is counted, `reason` is for people."""

    kind: str
    reason: str


def owed_lease(event: ResultArrived, leases: Leases) -> OpenLease | Refusal:
    """The open lease under which this node owes this sample. A refusal here changes nothing: the attempt is closed,
    was never issued, or is another node's."""
    lease = leases.open.get(event.lease)
    if lease is None and not leases.was_issued(event.lease):
        return Refusal("unknown_attempt", "there is no such lease")
    if lease is None or event.sample not in lease.samples:
        return Refusal("late", "this attempt is closed, or was never part of the lease")
    if lease.node != event.node:
        return Refusal("wrong_node", f"the lease is {lease.node}'s")
    return lease


def why_refused(event: ResultArrived, lease: OpenLease, registered: AbstractSet[tuple[int, str]]) -> Refusal | None:
    """Why an owed result must not train (or be evaluated); None when it may. `registered` holds every (version,
    digest) that was ever published in this run."""
    if event.problem:
        return Refusal("problem", event.problem)
    if event.status != "ok":
        return None
    if not event.versions:
        return Refusal("nothing_sampled", "it has no sampled token")
    if lease.policy is not None:
        pinned = (lease.policy.version, lease.policy.digest)
        if any((run.version, run.digest) != pinned for run in event.versions):
            return Refusal("wrong_policy", f"not evaluated under {lease.policy.short()}")
        return None
    for run in event.versions:
        if (run.version, run.digest) not in registered:
            return Refusal("unregistered", f"policy {run.version}-{run.digest[:8]} was never published")
    oldest = oldest_version(event.versions)
    if oldest < lease.min_version:
        return Refusal("too_old", f"sampled under version {oldest}, leased for {lease.min_version} or newer")
    return None


def disposition_problem(dispositions: Sequence[Disposition], lent: AbstractSet[tuple[int, int]]) -> str:
    """What is wrong when dispositions do not name exactly the lent attempts, once each; empty when they do."""
    named = {(item.lease, item.sample) for item in dispositions}
    if len(named) != len(dispositions):
        return "an attempt is named twice"
    if named != lent:
        lease, sample = min(named ^ lent)
        fault = "is missing" if (lease, sample) in lent else "is not in it"
        return f"attempt {lease}/{sample} {fault} ({len(lent)} attempts lent, {len(named)} named)"
    return ""

"""Which files of the store lead to a policy, and which are kept so that they do.

A file stands alone (an adapter, all weights, or the word that the weights are those of the checkpoint), or it changes
the weights of its parent (kind "factors"). What the weights are is said by version and digest, under whatever name, so
the updates of a lineage that the trainer has given up lead nowhere else:

    snapshot 50 ── 51 ── 52 ── 53      a node at 51 applies 52 and 53; a late joiner the snapshot, 51, 52 and 53
              └─── 51'── 52'           a trainer that started again at 50: the way from 53 to 52' begins at the snapshot
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from async_rl.proof import CANARY
from async_rl.version import PolicyId
from async_rl.wire.messages import FACTORS

Weights = tuple[int, str]  # (version, digest)


class StoredPolicy(NamedTuple):
    """`order` is 0 for what is not announced; `parent` is whose weights a file of factors changes."""

    policy: PolicyId
    kind: str
    size: int
    sha256: str
    order: int
    parent: PolicyId | None = None


def weights(policy: PolicyId) -> Weights:
    return policy.version, policy.digest


class Routes:
    """Of files in the order in which they were stored; a parent's version is always the lower one."""

    def __init__(self, stored: Iterable[StoredPolicy]) -> None:
        self._alone: dict[Weights, StoredPolicy] = {}  # the smallest of those with these weights
        self._updates: dict[Weights, StoredPolicy] = {}
        for entry in stored:
            key = weights(entry.policy)
            if entry.kind == FACTORS:
                self._updates[key] = entry
            elif key not in self._alone or entry.size < self._alone[key].size:
                self._alone[key] = entry

    def back(self, policy: PolicyId) -> Iterator[tuple[Weights, StoredPolicy | None, StoredPolicy | None]]:
        """From a policy back along its parents: the weights, the file that makes them alone, and the update that makes
        them of their parent's; each of the two where it is stored. O(1) a step."""
        key: Weights | None = weights(policy)
        while key is not None:
            update = self._updates.get(key)
            yield key, self._alone.get(key), update
            key = weights(update.parent) if update is not None and update.parent is not None else None

    def to(self, policy: PolicyId, have: PolicyId | None) -> tuple[StoredPolicy, ...] | None:
        """The files that have to be applied, in order, by a node whose weights are those of `have`, in order to have
        those of `policy`: of all ways the one with the fewest bytes, and of such the shortest. None: there is no way.
        O(chain)."""
        best: tuple[int, int] | None = None  # bytes, files
        start: StoredPolicy | None = None
        after: list[StoredPolicy] = []
        size = 0
        for key, alone, update in self.back(policy):
            if have is not None and key == weights(have) and (best is None or (size, len(after)) < best):
                best, start = (size, len(after)), None
            if alone is not None and (best is None or (size + alone.size, len(after) + 1) < best):
                best, start = (size + alone.size, len(after) + 1), alone
            if update is not None:
                after.append(update)
                size += update.size
        if best is None:
            return None
        updates = after[: best[1] - (start is not None)]
        return (*(() if start is None else (start,)), *reversed(updates))

    def needed(self, policy: PolicyId, standing: int = 1) -> list[StoredPolicy]:
        """What makes a policy reachable for whoever joins: the last file in its past that stands alone, and the updates
        since; or the last so many that do. With fewer than that, all that there is."""
        needed: list[StoredPolicy] = []
        for _, alone, update in self.back(policy):
            if alone is not None:
                needed.append(alone)
                standing -= 1
            if standing == 0:
                break
            if update is not None:
                needed.append(update)
        return needed


def expired(stored: Sequence[StoredPolicy], pins: Iterable[PolicyId], max_staleness: int) -> list[StoredPolicy]:
    """The retention rule. Kept are the canary; what is at most max_staleness + 1 behind the newest *announced* version
    (one more than the bound, for a node whose pull began before the newest arrived); what is pinned; what was stored
    last, with which a trainer that has gone back begins another past of versions to come; and all that makes these
    reachable. Of the newest's past also the snapshot before the last one, with the updates since: a node that was
    pulling them when the last one came has until the next one to finish. `stored` is in the order in which it was
    stored."""
    policies = [entry for entry in stored if entry.kind != CANARY]
    newest = max(policies, key=lambda entry: entry.order, default=None)
    if newest is None or not newest.order:
        return []
    oldest = newest.policy.version - max_staleness - 1
    routes = Routes(policies)
    reachable = {entry.policy for entry in policies if entry.policy.version >= oldest} | {policies[-1].policy, *pins}
    needed = [entry for policy in reachable for entry in routes.needed(policy)]
    kept = reachable | {entry.policy for entry in (*needed, *routes.needed(newest.policy, standing=2))}
    return [entry for entry in policies if entry.policy not in kept]

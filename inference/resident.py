"""Which policies are resident on an engine: slots and reference counts, pure.

    free -- add --> idle -- serve --> serving -- serve another --> idle -- remove --> free
                     |  ^                                            |
                  acquire / release: a request that uses it        used: not removable

Guarantees, whatever the order of calls: at most `max_resident` policies at once, each in a slot of its own; the
serving policy and a policy in use are never removed; a count never goes below zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from async_rl.version import PolicyId
from inference.engine import EngineError


class ResidentPolicies:
    """Slots 0..max_resident-1 and who is in them; `serving` is the policy under which new requests start."""

    def __init__(self, max_resident: int) -> None:
        if max_resident < 1:
            raise EngineError(f"max_resident is {max_resident}: an engine must hold at least one policy")
        self.max_resident = max_resident
        self.serving: PolicyId | None = None
        self._slots: dict[PolicyId, int] = {}
        self._uses: dict[PolicyId, int] = {}

    @property
    def uses(self) -> Mapping[PolicyId, int]:
        """Requests per resident policy, as a live read-only view."""
        return MappingProxyType(self._uses)

    def __contains__(self, policy: PolicyId) -> bool:
        return policy in self._slots

    def slot(self, policy: PolicyId) -> int:
        """Slot of a resident policy; raises EngineError when it is not resident."""
        if policy not in self._slots:
            held = ", ".join(other.short() for other in self._slots) or "none"
            raise EngineError(f"policy {policy.short()} is not resident (resident: {held}): install it first")
        return self._slots[policy]

    def free_slot(self) -> int:
        """The slot that may be loaded next; raises EngineError when every slot is taken."""
        taken = set(self._slots.values())
        for slot in range(self.max_resident):
            if slot not in taken:
                return slot
        held = ", ".join(f"{policy.short()} ({uses} requests)" for policy, uses in self._uses.items())
        raise EngineError(
            f"all {self.max_resident} policy slots are taken: {held}. Evict one that no request uses, rebind the "
            "requests of an old one, or raise [inference] max_resident"
        )

    def add(self, policy: PolicyId) -> int:
        """Take a free slot for a policy that was loaded; returns the slot. Adding it again changes nothing."""
        if policy not in self._slots:
            self._slots[policy] = self.free_slot()
            self._uses[policy] = 0
        return self._slots[policy]

    def remove(self, policy: PolicyId) -> None:
        """Free the slot of a policy. Raises EngineError when it serves, is in use, or is not resident."""
        self.slot(policy)
        if policy == self.serving:
            raise EngineError(f"policy {policy.short()} is serving: flip to another one before evicting it")
        if self._uses[policy]:
            raise EngineError(
                f"policy {policy.short()} is used by {self._uses[policy]} requests: wait for them, abort them, or "
                "rebind them"
            )
        del self._slots[policy], self._uses[policy]

    def serve(self, policy: PolicyId) -> None:
        """Make a resident policy the serving one."""
        self.slot(policy)
        self.serving = policy

    def acquire(self, policy: PolicyId) -> None:
        """One more request uses a resident policy."""
        self.slot(policy)
        self._uses[policy] += 1

    def release(self, policy: PolicyId) -> None:
        """One request fewer; raises EngineError below zero, which would be a bug of the engine."""
        self.slot(policy)
        if not self._uses[policy]:
            raise EngineError(f"policy {policy.short()} released more often than it was acquired")
        self._uses[policy] -= 1

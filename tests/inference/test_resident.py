"""The pure rules of resident policies, against any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.version import PolicyId
from inference.engine import EngineError
from inference.resident import ResidentPolicies

POLICIES = [PolicyId("main", version, f"{version:064x}") for version in range(6)]
policies = st.sampled_from(POLICIES)


class AnyOrder(RuleBasedStateMachine):
    """Compares with the obvious model: a dict of counts and the serving policy."""

    def __init__(self) -> None:
        super().__init__()
        self.resident = ResidentPolicies(3)
        self.counts: dict[PolicyId, int] = {}
        self.slots: dict[PolicyId, int] = {}

    @rule(policy=policies)
    def add(self, policy):
        if policy in self.counts or len(self.counts) < 3:
            slot = self.resident.add(policy)
            assert self.slots.setdefault(policy, slot) == slot
            self.counts.setdefault(policy, 0)
        else:
            with pytest.raises(EngineError, match="slots are taken"):
                self.resident.add(policy)

    @rule(policy=policies)
    def remove(self, policy):
        if self.counts.get(policy) == 0 and policy != self.resident.serving:
            self.resident.remove(policy)
            del self.counts[policy], self.slots[policy]
        else:
            with pytest.raises(EngineError):
                self.resident.remove(policy)

    @rule(policy=policies)
    def serve(self, policy):
        before = self.resident.serving
        if policy in self.counts:
            self.resident.serve(policy)
            assert self.resident.serving == policy
        else:
            with pytest.raises(EngineError, match="not resident"):
                self.resident.serve(policy)
            assert self.resident.serving == before

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def use(self, data):
        policy = data.draw(st.sampled_from(sorted(self.counts, key=lambda p: p.version)))
        if data.draw(st.booleans()):
            self.resident.acquire(policy)
            self.counts[policy] += 1
        elif self.counts[policy]:
            self.resident.release(policy)
            self.counts[policy] -= 1
        else:
            with pytest.raises(EngineError, match="more often"):
                self.resident.release(policy)

    @invariant()
    def agrees(self):
        assert dict(self.resident.uses) == self.counts
        assert {policy: self.resident.slot(policy) for policy in self.counts} == self.slots
        assert len(set(self.slots.values())) == len(self.slots) <= 3
        assert set(self.slots.values()) <= {0, 1, 2}
        assert self.resident.serving is None or self.resident.serving in self.counts


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)


def test_no_policy_slot_at_all_is_refused():
    with pytest.raises(EngineError, match="max_resident is 0"):
        ResidentPolicies(0)

"""What the buffer's tests share: rules with small numbers, a hand-driven replay, and an audit of its books."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Disposition, Lease, SamplingParams
from buffer.events import (
    AnyEvent,
    BatchConfirmed,
    CancelLease,
    DrawRequested,
    Effect,
    EndRun,
    GrantLease,
    LendBatch,
    NodeAttested,
    NodeJoined,
    NodeWanted,
    PolicyRegistered,
    ResultArrived,
)
from buffer.leases import EVAL_TICKET
from buffer.ledger import members
from buffer.replay import Replay
from buffer.rules import Rules
from buffer.snapshot import dump, load

GROUP_BYTES = 1000


def small_rules(**changes: Any) -> Rules:
    """Ten steps of two groups of two, bound 1, fifo; K_a follows from the bound and the window unless given."""
    values: dict[str, Any] = {
        "run_seed": 7,
        "steps": 10,
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 1,
        "window": 1,
        "on_short_group": "retry",
        "zero_variance": "keep",
        "max_tries": 3,
        "capacity_bytes": 10**9,
        "group_bytes": GROUP_BYTES,
        "lease_timeout": 60.0,
        "eval_share": 0.5,
        "sampling": SamplingParams(1.0, 8),
        **changes,
    }
    overtaking = math.ceil((values["window"] - 1) / values["groups_per_step"])
    values.setdefault("lead", values["max_staleness"] - overtaking - (values.get("reuse", 1) - 1))
    return Rules(**values)


def audit(replay: Replay) -> None:
    """Recount everything that is counted as it goes, and state what may never be."""
    rules, ledger = replay.rules, replay.ledger
    groups = replay.groups.by_ticket
    lent = {group.ticket for group in replay.lent or () if not replay.groups.pool.uses(group.ticket)}
    training = [lease for lease in replay.leases.open.values() if lease.ticket != EVAL_TICKET]
    evaluating = [lease for lease in replay.leases.open.values() if lease.ticket == EVAL_TICKET]

    for counts in (ledger, replay.eval_ledger):
        assert counts["issued"] == sum(count for place, count in counts.items() if place != "issued")
        assert min(counts.values()) >= 0
    assert ledger["leased"] == sum(len(lease.samples) for lease in training)
    assert replay.eval_ledger["leased"] == len(evaluating)
    assert ledger["batched"] == sum(groups[ticket].good for ticket in lent)
    assert ledger["ready"] == sum(group.good for group in groups.values() if group.ticket not in lent)

    may_be_used_again(replay, lent)
    if not replay.ended:
        for group in groups.values():
            assert len(group.missing) + group.out + group.good + len(group.failed) == rules.group_size
            assert replay.groups.queue.is_open(group.ticket) == bool(group.missing)
        ready = [group for group in groups.values() if group.ready and group.ticket not in lent]
        assert replay.ready_groups == len(ready)
        counted = [group for group in groups.values() if not group.reserved and group.ticket not in lent]
        assert {group.ticket for group in ready} <= {group.ticket for group in counted}
        assert replay.ready_bytes == sum(len(held.payload) for group in counted for held in group.held)
        unsettled = [ticket for ticket, group in groups.items() if not group.ready]
        oldest = min(unsettled, default=replay.groups.queue.next_ticket)
        assert replay.groups.order.oldest_unsettled() == oldest
        if replay.draw_pending:
            nobody_waits_for_credit(replay, oldest)
    assert replay.reserved_bytes == rules.group_bytes * sum(group.reserved for group in groups.values())
    owed: Counter[str] = Counter()
    for lease in replay.leases.open.values():
        owed[lease.node] += len(lease.samples)
    holders = {id(lease.holder): lease.holder for lease in replay.leases.open.values()}.values()
    assert sorted(number for holder in holders for number in holder.leases) == list(replay.leases.open)
    evaluating_on = Counter(lease.node for lease in evaluating)
    for node in replay.nodes_view().values():
        assert node.leased_samples == owed[node.name]
        assert evaluating_on[node.name] <= max(1, int(node.slots * rules.eval_share))


def may_be_used_again(replay: Replay, lent: set[int]) -> None:
    """The groups that may train once more: none too old or used up, no more than was promised, all with room."""
    rules, pool, groups = replay.rules, replay.groups.pool, replay.groups.by_ticket
    assert not pool.tickets & groups.keys()
    assert len(pool.tickets) <= (rules.reuse > 1) * rules.max_staleness * rules.fresh_groups
    kept = list(pool._kept.values())
    for each in kept:
        assert 1 <= each.uses < rules.reuse
        assert each.group.good
        assert all(replay.confirmed_batches - held.oldest <= rules.max_staleness for held in each.group.held)
        assert not any(record.leased or record.ready or record.batched for record in each.group.leases)
    if not replay.ended:
        held = [each.group.payload_bytes for each in kept]
        held += [groups[ticket].payload_bytes for ticket in lent if rules.reuse > 1]
        assert replay.kept_bytes == sum(held)


def nobody_waits_for_credit(replay: Replay, oldest: int) -> None:
    """While the trainer waits, the ticket it waits for is leased, or no node that asks for work may have it. Credit
    does not come into it: whatever the capacity, this must hold after every event."""
    rules = replay.rules
    group = replay.groups.by_ticket.get(oldest)
    if oldest >= rules.steps * rules.fresh_groups or (group is not None and not group.missing):
        return
    for node in replay.nodes_view().values():
        if node.state == "ready" and node.wanted > node.granted and node.policy is not None:
            first_too_far = (node.policy.version + 1 + replay.lead) * rules.fresh_groups
            assert oldest >= first_too_far, f"{node.name} waits, the trainer waits, and ticket {oldest} is not leased"


class Play:
    """A replay with a hand on each lever; the books are audited after every event."""

    def __init__(self, **changes: Any) -> None:
        self.rules = small_rules(**changes)
        self.replay = Replay(self.rules)
        self.now = 0.0
        self.policies: list[PolicyId] = []

    def apply(self, event: AnyEvent) -> list[Effect]:
        effects = self.replay.apply(event, self.now)
        audit(self.replay)
        snapshot = dump(self.replay)
        assert dump(load(snapshot, self.rules)) == snapshot
        return effects

    def publish(self, digest: str = "") -> PolicyId:
        policy = PolicyId("main", len(self.policies), digest or f"d{len(self.policies)}")
        self.policies.append(policy)
        self.apply(PolicyRegistered(policy))
        return policy

    def attest(self, node: str, version: int = -1) -> list[Lease]:
        return leases(self.apply(NodeAttested(node, self.policies[version])))

    def want(self, node: str, total: int) -> list[Lease]:
        return leases(self.apply(NodeWanted(node, total)))

    def node(self, name: str, wanted: int = 0, slots: int = 8) -> list[Lease]:
        """A node that serves the newest policy, and the leases that its wish earns."""
        if not self.policies:
            self.publish()
        self.apply(NodeJoined(name, slots))
        return self.attest(name) + self.want(name, wanted)

    def result(self, lease: Lease, sample: int, node: str = "a", **changes: Any) -> list[Effect]:
        """A good result under the lease's own minimum version, unless changed."""
        policy = lease.policy or self.policies[lease.min_version]
        values: dict[str, Any] = {
            "node": node,
            "lease": lease.lease,
            "sample": sample,
            "status": "ok",
            "reward": float(sample),
            "versions": (VersionRun(policy.version, policy.digest, 5),),
            "n_tokens": 5,
            "payload": memoryview(f"{lease.lease}/{sample}".encode()),
            **changes,
        }
        return self.apply(ResultArrived(**values))

    def deliver(self, lease: Lease, node: str = "a", **changes: Any) -> list[Effect]:
        return [effect for sample in lease.samples for effect in self.result(lease, sample, node, **changes)]

    def draw(self, version: int | None = None) -> list[LendBatch]:
        for_version = self.replay.confirmed_batches if version is None else version
        return of(LendBatch, self.apply(DrawRequested(for_version)))

    def confirm(self, outcome: Any = "trained", ess: float | None = None) -> list[Effect]:
        """Publish the next version and confirm the lent batch, all with one outcome."""
        leases = [record for group in self.replay.lent or () for record in group.leases]
        held = [(record.lease, members(held.samples)) for record in leases for held in record.held]
        self.publish()
        dispositions = tuple(Disposition(lease, samples, outcome) for lease, samples in held)
        return self.apply(BatchConfirmed(self.replay.confirmed_batches, dispositions, ess))


def of(kind: type[Any], effects: list[Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def leases(effects: list[Effect]) -> list[Lease]:
    return [effect.lease for effect in of(GrantLease, effects)]


class Tools:
    """Handed to tests as the fixture `tools`, since test files do not import each other."""

    play: Callable[..., Play] = Play
    rules = staticmethod(small_rules)
    audit = staticmethod(audit)
    leases = staticmethod(leases)

    @staticmethod
    def granted(effects: list[Effect]) -> list[tuple[str, int]]:
        return [(effect.node, effect.lease.ticket) for effect in of(GrantLease, effects)]

    @staticmethod
    def cancelled(effects: list[Effect]) -> list[tuple[str, int]]:
        return [(effect.node, effect.lease) for effect in of(CancelLease, effects)]

    @staticmethod
    def errors(effects: list[Effect]) -> list[str]:
        return [effect.error for effect in of(EndRun, effects)]

    of = staticmethod(of)


@pytest.fixture
def tools() -> type[Tools]:
    return Tools

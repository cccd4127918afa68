"""Nodes that leave: what they have not begun is leased again, what they have begun goes on under the same attempt."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Lease
from buffer.events import (
    Effect,
    EvalRequested,
    HandedPrefix,
    MoveLease,
    NodeAttested,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodeWanted,
    PrefixesHandedOver,
    ResultArrived,
    RunFinished,
    SamplesReturned,
    Ticked,
)
from buffer.rules import ENDLESS


def prefix(policy: PolicyId, sample: int, tokens: int = 3, **changes: Any) -> HandedPrefix:
    values: dict[str, Any] = {
        "sample": sample, "versions": (VersionRun(policy.version, policy.digest, tokens),),
        "payload": f"so far of {sample}".encode(),
    }  # fmt: skip
    return HandedPrefix(**(values | changes))


def hand_over(play: Any, node: str, lease: Lease, samples: Iterable[int], **changes: Any) -> list[Effect]:
    prefixes = tuple(prefix(play.policies[lease.min_version], sample, **changes) for sample in samples)
    return play.apply(PrefixesHandedOver(node, lease.lease, prefixes))


def moves(effects: list[Effect]) -> list[MoveLease]:
    return [effect for effect in effects if isinstance(effect, MoveLease)]


def test_a_draining_node_is_given_nothing_more_and_still_delivers(tools):
    play = tools.play()
    lease, _ = play.node("a", 4)
    play.apply(NodeDraining("a"))
    assert play.replay.nodes_view()["a"].state == "draining"
    assert play.want("a", 99) == []
    play.publish()
    assert play.attest("a") == []
    play.apply(EvalRequested(play.policies[1], 2, play.rules.sampling, 9.0))
    assert play.replay.eval_ledger["issued"] == 0
    assert play.replay.nodes_view()["a"].state == "draining"
    play.deliver(lease)
    assert play.replay.ledger["ready"] == 2


def test_what_is_given_back_is_leased_again_as_it_was_and_costs_no_try(tools):
    play = tools.play(max_tries=1)
    lease, other = play.node("a", 4)
    play.result(lease, 0)
    play.apply(NodeDraining("a"))
    play.apply(SamplesReturned("a", lease.lease, (0, 1, 1, 77)))
    play.apply(SamplesReturned("a", other.lease, (0, 1)))
    assert play.replay.ledger["dropped.cancelled"] == 3
    again, whole = play.node("b", 3)
    assert (again.ticket, again.samples, again.seeds, again.try_) == (0, (1,), lease.seeds[1:], 0)
    assert (whole.ticket, whole.samples, whole.seeds) == (1, (0, 1), other.seeds)


def test_a_handed_over_attempt_goes_on_elsewhere_as_the_same_attempt(tools):
    play = tools.play()
    lease, other = play.node("a", 4)
    play.node("b", 0)
    play.result(lease, 0)
    play.apply(NodeDraining("a"))
    issued = play.replay.ledger["issued"]
    (move,) = moves(hand_over(play, "a", lease, [1]))
    assert move.node == "b"
    assert move.payloads == (b"so far of 1",)
    assert (move.lease.lease, move.lease.samples, move.lease.seeds) == (lease.lease, (1,), lease.seeds[1:])
    assert (move.lease.instance, move.lease.min_version) == (lease.instance, lease.min_version)
    assert play.replay.ledger["issued"] == issued
    play.apply(NodeLost("a", "it said goodbye"))
    assert play.replay.ledger["dropped.node_lost"] == len(other.samples)
    play.result(lease, 1, node="a")  # the first holder's word counts no more
    assert play.replay.outside == {"wrong_node": 1}
    play.result(lease, 1, node="b")
    assert play.replay.ledger["ready"] == 2
    assert play.replay.ready_groups == 1
    assert play.replay.handovers.counts == {"handed_over": 1, "mixed": 0}


def test_what_is_not_handed_over_with_its_lease_is_leased_again(tools):
    play = tools.play(group_size=4)
    lease = play.node("a", 1)[0]
    play.node("b", 0)
    (move,) = moves(hand_over(play, "a", lease, [1, 3]))
    assert move.lease.samples == (1, 3)
    (again,) = [each for each in play.want("b", 3) if each.ticket == lease.ticket]
    assert again.samples == (0, 2)
    assert play.replay.ledger["dropped.cancelled"] == 2


def test_a_lease_is_moved_to_the_node_that_serves_its_policy_then_to_the_newest_then_to_the_idlest(tools):
    play = tools.play(groups_per_step=8, max_staleness=4)
    first, second, third, fourth = play.node("a", 8)
    play.publish()
    play.node("newer", 0)
    play.apply(NodeJoined("same", 8))
    play.apply(NodeAttested("same", play.policies[0]))
    assert moves(hand_over(play, "a", first, first.samples))[0].node == "same"
    play.apply(NodeLost("same", "test"))
    assert moves(hand_over(play, "a", second, second.samples))[0].node == "newer"
    play.node("idle", 0)
    assert moves(hand_over(play, "a", third, third.samples))[0].node == "idle"
    assert {move.node for move in moves(hand_over(play, "a", fourth, fourth.samples))} <= {"idle", "newer"}


def test_a_parked_lease_waits_for_a_node_and_says_so(tools):
    play = tools.play()
    lease, other = play.node("a", 4)
    play.apply(NodeDraining("a"))
    assert moves(hand_over(play, "a", lease, lease.samples)) == []
    play.apply(NodeLost("a", "it said goodbye"))
    assert play.replay.ledger["leased"] == 2
    play.draw()
    assert "leased to no node yet (handed over)" in play.replay.waiting(0.0)
    play.apply(NodeJoined("b", 8))
    (move,) = moves(play.apply(NodeAttested("b", play.policies[0])))
    assert (move.node, move.lease.samples) == ("b", (0, 1))
    # What was moved counts as granted: the node asks for so much less.
    assert play.replay.nodes_view()["b"].granted == 2
    assert play.want("b", 2) == []
    assert [each.ticket for each in play.want("b", 3)] == [other.ticket]


def test_a_lease_that_is_not_new_enough_elsewhere_stays_parked(tools):
    play = tools.play()
    play.publish()
    play.publish()
    lease, _ = play.node("a", 4)
    assert lease.min_version == 1
    play.apply(NodeJoined("old", 8))
    play.apply(NodeAttested("old", play.policies[0]))
    play.apply(NodeDraining("a"))
    assert moves(hand_over(play, "a", lease, lease.samples)) == []
    (move,) = moves(play.apply(NodeAttested("old", play.policies[1])))
    assert move.node == "old"


def test_a_parked_lease_that_nobody_takes_is_cancelled_at_its_deadline(tools):
    play = tools.play(lease_timeout=60.0)
    lease, _ = play.node("a", 4)
    play.apply(NodeDraining("a"))
    hand_over(play, "a", lease, lease.samples)
    play.now = 61.0
    assert ("no node yet (handed over)", lease.lease) not in tools.cancelled(play.apply(Ticked()))
    assert play.replay.ledger["leased"] == 0
    assert play.replay.handovers.parked == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"problem": "sizes differ"},
        {"versions": ()},
        {"versions": (VersionRun(1, "never published", 3),)},
        {"versions": (VersionRun(0, "d0", 3),)},
    ],
)
def test_a_prefix_that_cannot_be_believed_is_sampled_again(tools, changes):
    play = tools.play()
    play.publish()
    play.publish()
    lease, _ = play.node("a", 4)
    play.node("b", 0)
    assert moves(hand_over(play, "a", lease, lease.samples, **changes)) == []
    assert play.replay.ledger["dropped.cancelled"] == 2


def test_a_change_of_policy_where_an_attempt_changed_hands_is_counted_and_any_other_is_not(tools):
    play = tools.play(max_staleness=4)
    lease, other = play.node("a", 4)
    play.publish()
    play.node("b", 0)
    hand_over(play, "a", lease, (0, 1), tokens=3)
    hand_over(play, "a", other, (0, 1), tokens=3)
    one, two = (lambda n: VersionRun(0, "d0", n)), (lambda n: VersionRun(1, "d1", n))
    for each, sample, versions in [
        (lease, 0, (one(3), two(2))), (lease, 1, (one(5),)), (other, 0, (one(4), two(1))), (other, 1, (one(3),)),
    ]:  # fmt: skip
        play.result(each, sample, node="b", versions=versions)
    assert play.replay.handovers.counts == {"handed_over": 4, "mixed": 1}


def test_evaluation_is_not_handed_over_but_asked_again_with_the_same_seed(tools):
    play = tools.play()
    play.node("a", 0)
    (lease,) = tools.leases(play.apply(EvalRequested(play.policies[0], 1, play.rules.sampling, 9.0)))
    play.node("b", 0)
    play.apply(NodeDraining("a"))
    effects = hand_over(play, "a", lease, [0])
    assert moves(effects) == []
    (again,) = tools.leases(effects)
    assert (again.seeds, again.instance, again.split) == (lease.seeds, lease.instance, "eval")
    assert play.replay.eval_ledger["dropped.cancelled"] == 1


def test_words_about_leases_that_are_not_its_own_change_nothing(tools):
    play = tools.play()
    lease, _ = play.node("a", 4)
    play.node("b", 0)
    before = play.replay.ledger
    for event in (
        SamplesReturned("b", lease.lease, (0,)), SamplesReturned("b", 99, (0,)), NodeDraining("ghost"),
        PrefixesHandedOver("b", lease.lease, (prefix(play.policies[0], 0),)),
    ):  # fmt: skip
        play.apply(event)
    assert play.replay.ledger == before
    assert play.replay.outside == {"late": 2, "unknown_attempt": 1, "unknown_node": 1}


# --- anything at all -------------------------------------------------------------------------------------------------


class Pool:
    """Nodes that come, drain, hand over, die and deliver in any order; `Play` audits after every event. Every attempt
    is followed: who holds it, and that a hand-over issues none."""

    def __init__(self, tools: Any, rng: Any, **changes: Any) -> None:
        self.rng = rng
        self.play = tools.play(
            max_tries=10**6, steps=6, groups_per_step=3, group_size=3, max_staleness=2, lease_timeout=20.0, **changes
        )
        self.tools = tools
        self.holds: dict[str, dict[int, Lease]] = {}
        self.wanted: dict[str, int] = {}
        self.draining: set[str] = set()
        self.moved = 0
        self._apply, self.play.apply = self.play.apply, self.heard
        self.play.publish()

    def heard(self, event: Any) -> list[Any]:
        """Every event goes this way, also those that `Play` makes of itself."""
        issued = self.play.replay.ledger["issued"]
        effects: list[Any] = self._apply(event)
        granted = self.tools.leases(effects)
        new = sum(len(lease.samples) for lease in granted if lease.split == "train")
        assert self.play.replay.ledger["issued"] == issued + new  # a move issues nothing
        for effect in effects:
            if isinstance(effect, MoveLease):
                self.moved += 1
                assert len(effect.payloads) == len(effect.lease.samples)
                assert not any(effect.lease.lease in held for held in self.holds.values())
            if hasattr(effect, "lease") and isinstance(effect.lease, Lease):
                assert effect.node not in self.draining
                self.holds[effect.node][effect.lease.lease] = effect.lease
            elif type(effect).__name__ == "CancelLease":
                self.holds.get(effect.node, {}).pop(effect.lease, None)
        return effects

    def join(self, name: str) -> None:
        self.holds[name], self.wanted[name] = {}, 0
        self.draining.discard(name)
        self.play.apply(NodeJoined(name, 6))
        self.play.apply(NodeAttested(name, self.play.policies[-1]))

    def lose(self, name: str) -> None:
        self.holds.pop(name, None)
        self.draining.discard(name)
        self.play.apply(NodeLost(name, "test"))

    def want(self, name: str) -> None:
        self.wanted[name] += self.rng.randrange(8)
        self.play_want(name)

    def play_want(self, name: str) -> None:
        self.play.apply(NodeWanted(name, self.wanted[name]))

    def open_lease(self, name: str) -> Lease | None:
        held = [lease for lease in self.holds.get(name, {}).values() if self.owed(name, lease)]
        return self.rng.choice(held) if held else None

    def owed(self, name: str, lease: Lease) -> tuple[int, ...]:
        record = self.play.replay.leases.find(lease.lease)
        return record.samples if record is not None and record.node == name else ()

    def deliver(self, name: str, lease: Lease, sample: int) -> None:
        policy = self.play.policies[self.rng.randrange(lease.min_version, len(self.play.policies))]
        self.play.apply(
            ResultArrived(
                name, lease.lease, sample, self.rng.choice(["ok"] * 6 + ["env_failed"]), 1.0,
                (VersionRun(policy.version, policy.digest, 4),), 4, b"payload",
            )
        )  # fmt: skip

    def leave(self, name: str) -> None:
        """Give some back, hand some over, and go; or forget some, as a node that is killed while it drains."""
        self.draining.add(name)
        self.play.apply(NodeDraining(name))
        for lease in list(self.holds[name].values()):
            owed = self.owed(name, lease)
            fate = self.rng.randrange(4)
            if fate == 0 or not owed:
                continue
            del self.holds[name][lease.lease]
            if fate == 1:
                self.play.apply(SamplesReturned(name, lease.lease, owed))
            else:
                chosen = owed if fate == 2 else owed[: self.rng.randrange(1, len(owed) + 1)]
                policy = self.play.policies[lease.min_version]
                prefixes = tuple(prefix(policy, sample) for sample in chosen)
                self.play.apply(PrefixesHandedOver(name, lease.lease, prefixes))

    def train(self) -> None:
        self.play.draw()
        if self.play.replay.lent is not None:
            self.play.confirm()

    def step(self) -> None:
        self.play.now += self.rng.random()
        name = self.rng.choice("abcd")
        here = name in self.holds and name not in self.draining
        match self.rng.randrange(12):
            case 0 if not here:
                self.join(name)
            case 1 if name in self.holds:
                self.lose(name)
            case 2 if here:
                self.leave(name)
            case 3 if here:
                self.play.apply(NodeAttested(name, self.play.policies[-1]))
            case 4 | 5 if here:
                self.want(name)
            case 6:
                self.train()
            case 7:
                self.play.apply(Ticked())
            case _:
                lease = self.open_lease(name)
                if lease is not None:
                    self.deliver(name, lease, self.rng.choice(self.owed(name, lease)))

    def finish(self) -> None:
        """One good node at the end: the run comes to its end, and every ticket was trained."""
        for name in list(self.holds):
            self.lose(name)
        for _ in range(400):
            if self.play.replay.confirmed_batches == self.play.rules.steps:
                break
            if "last" not in self.holds:
                self.join("last")
            self.play.apply(NodeAttested("last", self.play.policies[-1]))
            self.wanted["last"] += 50
            self.play_want("last")
            for lease in list(self.holds["last"].values()):
                for sample in self.owed("last", lease):
                    self.deliver("last", lease, sample)
            self.train()
        assert self.play.replay.confirmed_batches == self.play.rules.steps


@pytest.mark.timeout(300)
@settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from(["wait", "drop", "mask"]))
def test_no_ticket_is_lost_and_no_attempt_has_two_holders_whoever_leaves_and_however(tools, rng, on_stale):
    changes = {} if on_stale == "wait" else {"on_stale": on_stale, "window": ENDLESS, "lead": 2}
    pool = Pool(tools, rng, **changes)
    for _ in range(150):
        pool.step()
    assert not pool.play.replay.ended
    pool.finish()
    ledger, rules = pool.play.replay.ledger, pool.play.rules
    assert ledger["trained"] == rules.steps * rules.groups_per_step * rules.group_size
    pool.play.apply(RunFinished("done"))
    assert [pool.play.replay.ledger[place] for place in ("leased", "ready", "batched")] == [0, 0, 0]
    assert pool.play.replay.handovers.parked == {}


def test_the_property_above_sees_leases_that_move(tools):
    moved = 0
    for seed in range(6):
        pool = Pool(tools, random.Random(seed))
        for _ in range(150):
            pool.step()
        moved += pool.moved
    assert moved > 5

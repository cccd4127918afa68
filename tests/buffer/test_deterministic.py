"""With run.deterministic, what a ticket is sampled under and with which seeds is decided by the ticket alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.proof import Proof
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Lease, Progress
from buffer.events import Effect, GrantLease, NodeHeld, NodeLost, PolicyRegistered, ResultRefused, Resumed, Ticked

B, K, STEPS = 2, 2, 8
NOTHING_TO_SHOW = Proof("", "", 0, b"")


def exact(tools: Any, **changes: Any) -> Any:
    return tools.play(deterministic=True, max_staleness=K, steps=STEPS, max_tries=5, **changes)


class Story:
    """Two nodes that ask, deliver, give up, vanish and are late, in an order that `chance` decides; what they are lent
    is compared with what the same tickets were before."""

    def __init__(self, tools: Any, seed: int) -> None:
        self.tools, self.play, self.chance = tools, exact(tools), random.Random(seed)
        self.asked: dict[int, tuple[PolicyId | None, int]] = {}
        self.seeds: dict[tuple[int, int], int] = {}
        self.held: dict[str, list[Lease]] = {"a": [], "b": []}
        self.wanted = {"a": 0, "b": 0}
        self.given_up = 0
        for name in self.held:
            self.take(self.play.node(name), name)

    def take(self, leases: list[Lease], node: str) -> None:
        for lease in leases:
            version = max(0, lease.ticket // B - K)
            assert (lease.policy, lease.min_version) == (self.play.policies[version], version)
            asked = (lease.policy, lease.instance)
            assert self.asked.setdefault(lease.ticket, asked) == asked
            for sample, seed in zip(lease.samples, lease.seeds, strict=True):
                assert self.seeds.setdefault((lease.ticket, sample), seed) == seed
            self.held[node].append(lease)

    def take_granted(self, effects: list[Effect]) -> None:
        for grant in self.tools.of(GrantLease, effects):
            self.take([grant.lease], grant.node)

    def ask(self, name: str) -> None:
        self.wanted[name] += 4
        self.take(self.play.want(name, self.wanted[name]), name)

    def attest(self, name: str) -> None:
        self.take(self.play.attest(name), name)

    def deliver(self, name: str) -> None:
        if self.held[name]:
            lease = self.held[name].pop(0)
            self.play.apply(NodeHeld(name, lease.policy, NOTHING_TO_SHOW))
            self.take_granted(self.play.deliver(lease, name))

    def give_up(self, name: str) -> None:
        if self.held[name] and self.given_up < self.play.rules.max_tries - 1:
            self.given_up += 1
            lease = self.held[name].pop(0)
            for sample in lease.samples:
                self.take_granted(self.play.result(lease, sample, name, status="aborted", versions=()))

    def vanish(self, name: str) -> None:
        self.held[name], self.wanted[name] = [], 0
        self.take_granted(self.play.apply(NodeLost(name, "gone")))
        self.take(self.play.node(name), name)

    def be_late(self, name: str) -> None:
        self.play.now += self.play.rules.lease_timeout + 1
        self.held = {"a": [], "b": []}
        self.take_granted(self.play.apply(Ticked()))

    def run(self) -> None:
        deeds = [self.ask, self.ask, self.deliver, self.deliver, self.deliver, self.attest, self.give_up, self.vanish]
        for _ in range(5000):
            if self.play.replay.confirmed_batches == STEPS:
                return
            deed = self.be_late if self.chance.random() < 0.05 else self.chance.choice(deeds)
            deed(self.chance.choice("ab"))
            if self.play.replay.ready_groups >= B and self.play.draw():
                self.take_granted(self.play.confirm())
            assert not self.play.replay.ended
        raise AssertionError(f"no end: {self.play.replay.waiting(self.play.now)}")


@given(st.integers(0, 1 << 32))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_lease_of_a_ticket_is_pinned_to_one_policy_with_the_same_seeds_whatever_happens(tools, seed):
    story = Story(tools, seed)
    story.run()
    assert set(story.asked) == set(range(STEPS * B))


def test_tokens_of_another_version_than_the_leases_own_are_refused(tools):
    play = exact(tools)
    (lease,) = play.node("a", 2)
    for _ in range(2):
        newer = play.publish()
    play.attest("a")
    (refused,) = tools.of(
        ResultRefused,
        play.result(lease, 0, versions=(VersionRun(newer.version, newer.digest, 5),)),
    )
    assert "leased for exactly 0" in refused.reason


def test_a_version_that_was_another_policy_before_ends_the_run_and_both_are_named(tools):
    play = exact(tools)
    play.publish("d" * 8)
    assert tools.errors(play.apply(PolicyRegistered(play.policies[0]))) == []
    (error,) = tools.errors(play.apply(PolicyRegistered(PolicyId("main", 0, "e" * 8))))
    assert "0-dddddddd" in error
    assert "0-eeeeeeee" in error


@pytest.mark.parametrize("deterministic", [False, True])
def test_without_its_journal_only_a_run_that_promised_nothing_goes_on(tools, deterministic):
    play = tools.play(deterministic=deterministic, max_staleness=K, steps=STEPS)
    progress = Progress(
        next_ticket=2, open_tickets={}, confirmed_batches=1, next_lease=2, ledger=play.replay.ledger,
        eval_ledger=play.replay.eval_ledger,
    )  # fmt: skip
    errors = tools.errors(play.apply(Resumed(progress)))
    assert bool(errors) == deterministic
    assert all("journal is lost" in error for error in errors)

"""A node that does not serve what was trained is set aside, and the others go on: the rules, without a process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.proof import CANARY, Proof, make_proof, mismatch, probe_tokens
from async_rl.version import PolicyId, VersionRun
from buffer.events import (
    EvalFinished,
    EvalRequested,
    NodeAttested,
    NodeHeld,
    NodeJoined,
    NodePassed,
    NodeRefused,
    PolicyRegistered,
    QuarantineNode,
    ResultArrived,
    Ticked,
)

VOCABULARY, BOUND = 50, 1e-3
TOKENS = probe_tokens(7, VOCABULARY)
N = len(TOKENS)
MODULES = ("layers.0.q_proj", "layers.1.q_proj")
CANARY_ID = PolicyId(CANARY, 0, "c" * 64)


def proof(shift: float, modules: tuple[str, ...] = MODULES, base: bool = False) -> Proof:
    """What a policy does that adds `shift` to a base model of log-probability -3 everywhere."""
    flat = [np.full(len(tokens) - 1, -3.0, np.float32) for tokens in TOKENS]
    return make_proof(TOKENS, [part + np.float32(shift) for part in flat], modules, flat if base else ())


class Run:
    """A replay in which every policy has a proof: version v adds v / 10 to the base model's log-probabilities."""

    def __init__(self, tools: Any, **changes: Any) -> None:
        self.tools = tools
        self.play = tools.play(**changes)
        self.play.apply(PolicyRegistered(CANARY_ID, proof(2.5, base=True)))
        self.publish()

    def publish(self) -> PolicyId:
        version = len(self.play.policies)
        policy = PolicyId("main", version, f"d{version}")
        self.play.policies.append(policy)
        self.play.apply(PolicyRegistered(policy, proof(version / 10)))
        return policy

    def join(self, name: str, canary: Proof | None = None, bound: float = BOUND) -> list[Any]:
        self.play.apply(NodeJoined(name, 8, bound))
        return self.play.apply(NodeHeld(name, CANARY_ID, canary or proof(2.5)))

    def attest(self, name: str, version: int, shown: Proof | None = None) -> list[Any]:
        return self.play.apply(NodeAttested(name, self.play.policies[version], shown or proof(version / 10)))

    def node(self, name: str, wanted: int) -> list[Any]:
        self.join(name)
        self.attest(name, -1, proof((len(self.play.policies) - 1) / 10))
        return self.play.want(name, wanted)

    def state(self, name: str) -> str:
        return str(self.play.replay.nodes_view()[name].state)

    def causes(self, effects: list[Any]) -> list[str]:
        return [effect.cause for effect in self.tools.of(QuarantineNode, effects)]


@pytest.fixture
def run(tools: Any) -> Run:
    return Run(tools)


WRONG = {
    "wrong scale": (proof(0.2), "differ from the trainer's by up to 0.1"),
    "the base model": (proof(0.0), "as the base model's do"),
    "another set of modules": (proof(0.1, MODULES[:1]), "another set of modules (1) than the trainer adapts (2)"),
    "other tokens": (make_proof(probe_tokens(8, VOCABULARY), N * [np.zeros(15, np.float32)], MODULES), "other tokens"),
    "fewer tokens": (make_proof(TOKENS, N * [np.zeros(14, np.float32)], MODULES), "another number of tokens"),
    "not a number": (make_proof(TOKENS, N * [np.full(15, np.nan, np.float32)], MODULES), "by up to inf"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_node_that_serves_another_policy_is_named_with_the_cause_and_its_leases_go_to_others(
    run: Run, fault: str
) -> None:
    leases = run.node("bad", 4)
    assert [lease.ticket for lease in leases] == [0, 1]
    run.node("good", 0)
    run.publish()
    shown, words = WRONG[fault]
    effects = run.attest("bad", 1, shown)
    (cause,) = run.causes(effects)
    assert words in cause
    assert "main 1-d1" in cause
    assert run.state("bad") == "quarantined"
    assert run.tools.cancelled(effects) == [("bad", lease.lease) for lease in leases]
    assert run.play.want("bad", 99) == []
    assert [lease.ticket for lease in run.play.want("good", 4)] == [0, 1]


def test_a_result_of_a_quarantined_node_changes_nothing(run: Run) -> None:
    (lease,) = run.node("bad", 2)
    run.publish()
    run.attest("bad", 1, proof(0.0))
    before = run.play.replay.ledger
    run.play.result(lease, 0, "bad", versions=(VersionRun(1, "d1", 5),))
    run.play.result(lease, 1, "bad", versions=(VersionRun(0, "d0", 5),))
    assert run.play.replay.ledger == before
    assert run.play.replay.outside["late"] == 2


def test_a_result_under_a_policy_that_its_node_has_not_attested_is_refused(run: Run) -> None:
    (lease,) = run.node("a", 2)
    run.publish()
    run.play.result(lease, 0, "a", versions=(VersionRun(0, "d0", 3), VersionRun(1, "d1", 2)))
    assert run.play.replay.refused == {"unattested": 1}
    run.attest("a", 1)
    run.play.result(lease, 1, "a", versions=(VersionRun(0, "d0", 3), VersionRun(1, "d1", 2)))
    assert run.play.replay.ledger["ready"] == 1


def test_a_node_is_leased_nothing_before_it_has_passed_its_canary(run: Run) -> None:
    run.play.apply(NodeJoined("a", 8, BOUND))
    (cause,) = run.causes(run.attest("a", 0))
    assert "canary" in cause
    assert run.play.want("a", 4) == []


def test_a_node_that_fails_its_canary_comes_back_only_when_it_is_started_again(run: Run) -> None:
    (cause,) = run.causes(run.join("a", proof(0.0)))
    assert "as the base model's do" in cause
    run.play.want("a", 4)
    run.publish()
    assert run.causes(run.attest("a", 1)) == []
    assert run.state("a") == "quarantined"
    assert "canary" in run.play.replay.nodes_view()["a"].reason
    assert run.node("a", 4) != []
    assert run.state("a") == "ready"


def test_a_node_comes_back_under_a_later_policy_that_passes_and_is_counted(run: Run) -> None:
    run.node("a", 4)
    run.publish()
    run.attest("a", 1, proof(0.0))
    assert run.state("a") == "quarantined"
    run.attest("a", 1)  # the policy that it failed for, and an older one, do not make up for it
    run.attest("a", 0)
    assert run.state("a") == "quarantined"
    run.publish()
    effects = run.attest("a", 2)
    assert run.state("a") == "ready"
    assert run.tools.leases(effects) == []  # until it asks for more
    assert [lease.ticket for lease in run.play.want("a", 8)] == [0, 1]
    assert (run.play.replay.nodes.quarantined, run.play.replay.nodes.returned) == (1, 1)


def test_a_node_that_cannot_load_a_policy_is_set_aside_with_the_engines_words(run: Run) -> None:
    run.node("a", 4)
    run.publish()
    effects = run.play.apply(NodeRefused("a", run.play.policies[1], "adapter is incomplete: target x has no lora_A"))
    assert run.causes(effects) == ["main 1-d1: it cannot load it: adapter is incomplete: target x has no lora_A"]


def test_a_bound_wider_than_any_engine_may_declare_is_held_to_the_largest(run: Run) -> None:
    run.join("liar", proof(0.0), bound=1e9)
    assert run.state("liar") == "quarantined"


def test_the_run_ends_naming_every_cause_when_no_node_may_work(tools: Any) -> None:
    run = Run(tools, quarantine_limit=5.0)
    run.node("a", 4)
    run.node("b", 4)
    run.publish()
    run.attest("a", 1, proof(0.0))
    run.play.now += 100
    assert run.tools.errors(run.play.apply(Ticked())) == []  # b works
    run.attest("b", 1, proof(0.5))
    for seconds, ends in ((0.0, False), (4.9, False), (0.2, True)):
        run.play.now += seconds
        errors = run.tools.errors(run.play.apply(Ticked()))
        assert bool(errors) == ends
    assert "a: main 1-d1: its log-prob" in errors[0]
    assert "b: main 1-d1: its log-prob" in errors[0]


def test_before_the_first_step_the_run_ends_at_once_when_all_its_nodes_were_refused(tools: Any) -> None:
    run = Run(tools, quarantine_limit=1e9, nodes=2)
    run.join("a", proof(0.0))
    assert run.tools.errors(run.play.apply(Ticked())) == []  # the other is still on its way
    run.join("b")
    assert run.tools.errors(run.play.apply(Ticked())) == []
    run.attest("b", 0, proof(0.2))
    (error,) = run.tools.errors(run.play.apply(Ticked()))
    assert error.startswith("no step was taken, as no node serves what the trainer has: a: canary 0-cccccccc: its log-")
    for words in ("up to 2.5", "bound is 0.001, and as the base model's do", "b: main 0-d0: its log-", "up to 0.2"):
        assert words in error
    for advice in ("[inference] dtype", "tied or untied", "alpha / rank", "async-rl doctor CONFIG"):
        assert advice in error


def test_after_the_first_step_refused_nodes_have_the_limit_to_come_back(tools: Any) -> None:
    run = Run(tools, quarantine_limit=5.0, nodes=1, steps=2, groups_per_step=1)
    (lease, *_) = run.node("a", 2)
    run.play.result(lease, 0, "a")
    run.play.result(lease, 1, "a")
    run.play.draw()
    run.play.confirm()
    run.publish()
    run.attest("a", 2, proof(0.0))
    assert run.tools.errors(run.play.apply(Ticked())) == []
    run.play.now += 5.1
    assert len(run.tools.errors(run.play.apply(Ticked()))) == 1


def test_the_measures_of_canary_and_first_policy_are_kept_and_told_once(tools: Any) -> None:
    run = Run(tools)
    told = run.tools.of(NodePassed, run.join("a", proof(2.5 + 5e-4)) + run.attest("a", 0, proof(2e-4)))
    assert [(each.policy.name, round(each.measure.max_dlogp, 5), each.bound) for each in told] == [
        ("canary", 5e-4, BOUND), ("main", 2e-4, BOUND)
    ]  # fmt: skip
    run.publish()
    assert run.tools.of(NodePassed, run.attest("a", 1)) == []
    view = run.play.replay.nodes_view()["a"]
    assert (view.canary, view.first) == (told[0].measure, told[1].measure)
    assert view.bound == BOUND


def test_a_node_that_joins_in_time_keeps_the_run_going(tools: Any) -> None:
    run = Run(tools, quarantine_limit=5.0)
    run.join("a", proof(0.0))
    run.play.apply(Ticked())
    run.play.now += 4
    run.play.apply(NodeJoined("b", 8, BOUND))
    run.play.now += 4
    assert run.tools.errors(run.play.apply(Ticked())) == []


def test_an_evaluated_policy_must_have_been_shown_too(run: Run, tools: Any) -> None:
    run.node("a", 0)
    policy = run.publish()
    request = EvalRequested(policy, 1, run.play.rules.sampling, 60.0)
    (lease,) = tools.leases(run.play.apply(request))
    (again,) = tools.leases(run.play.result(lease, 0, "a"))
    assert run.play.replay.refused == {"unattested": 1}
    run.play.apply(NodeHeld("a", policy, proof(0.1)))
    (result,) = tools.of(EvalFinished, run.play.result(again, 0, "a"))
    assert result.n == 1


def test_every_measure_is_kept_with_node_and_version(run: Run) -> None:
    run.node("a", 0)
    run.publish()
    run.attest("a", 1, proof(0.1 + 5e-4))
    quarantine = run.play.replay.quarantine
    assert [(each.node, each.version) for each in quarantine.measured] == [("a", 0), ("a", 0), ("a", 1)]
    assert quarantine.measured[-1].max_dlogp == pytest.approx(5e-4, rel=1e-2)
    assert quarantine.measured[-1].k3 == pytest.approx(0.5 * 5e-4**2, rel=1e-2)


KINDS = ["publish", "good", "bad", "refuse", "rejoin", "want", "deliver", "tick"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("ab"), st.booleans()), max_size=40))
def test_whatever_happens_a_quarantined_node_holds_no_lease_and_only_what_passed_is_kept(
    tools: Any, steps: list[tuple[str, str, bool]]
) -> None:
    run = Run(tools, quarantine_limit=1e9)
    passed: dict[str, set[int]] = {}
    for name in "ab":
        run.node(name, 2)
        passed[name] = {0}
    for kind, name, newest_policy in steps:
        newest = len(run.play.policies) - 1
        node = run.play.replay.nodes.get(name)
        if kind == "publish":
            run.publish()
        elif kind in ("good", "bad"):
            run.attest(name, newest, proof(newest / 10 if kind == "good" else 7.0))
            passed[name] = passed[name] | {newest} if kind == "good" else passed[name] - {newest}
        elif kind == "refuse":
            run.play.apply(NodeRefused(name, run.play.policies[newest], "no"))
            passed[name] -= {newest}
        elif kind == "rejoin":
            run.node(name, 4)
            passed[name] = {newest}
        elif kind == "want":
            run.play.want(name, node.wanted + 4)
        elif kind == "tick":
            run.play.apply(Ticked())
        else:
            version = newest if newest_policy else node.version
            stamp = (VersionRun(version, f"d{version}", 5),)
            for lease in [run.play.replay.leases.find(number) for number in sorted(node.leases)]:
                for sample in lease.samples:
                    arrived = ResultArrived(name, lease.lease, sample, "ok", 1.0, stamp, 5, b"payload")
                    before = run.play.replay.ledger["ready"]
                    run.play.apply(arrived)
                    assert run.play.replay.ledger["ready"] == before or version in passed[name]
        for view in run.play.replay.nodes_view().values():
            assert view.state != "quarantined" or view.leased_samples == 0


def test_the_probe_is_the_same_everywhere_and_inside_the_vocabulary() -> None:
    tokens = np.concatenate(probe_tokens(3, 11))
    assert len(tokens) == 128 <= 256
    assert set(tokens.tolist()) == set(range(11))
    assert tokens[:8].tolist() == np.concatenate(probe_tokens(3, 11))[:8].tolist()
    assert np.concatenate(probe_tokens(4, 11)).tolist() != tokens.tolist()


def test_mismatch_against_a_plain_sum() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = (generator.normal(-3, 1, 40).astype(np.float32) for _ in range(2))
    measured = mismatch(ours.tobytes(), theirs.tobytes())
    difference = ours.astype(float) - theirs.astype(float)
    assert measured is not None
    assert measured.max_dlogp == pytest.approx(max(map(abs, difference)))
    assert measured.k3 == pytest.approx(sum(np.exp(d) - 1 - d for d in difference) / 40)

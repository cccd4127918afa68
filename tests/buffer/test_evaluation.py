"""Evaluation: leased first, pinned to one policy, within a share of the slots, never trained on."""

from __future__ import annotations

import math
import struct

from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import SamplingParams
from buffer.events import (
    EvalFinished,
    EvalRequested,
    NodeAttested,
    NodeJoined,
    NodeLost,
    PolicyRegistered,
    RunFinished,
    Ticked,
)

GREEDY = SamplingParams(0.0, 16)


def request(play, n, timeout=30.0, policy=None):
    return play.apply(EvalRequested(policy or play.policies[-1], n, GREEDY, timeout))


def packed(rewards):
    return struct.pack(f"<{len(rewards)}d", *rewards)


def evals(tools, effects):
    return [lease for lease in tools.leases(effects) if lease.split == "eval"]


def test_evaluation_goes_out_first_within_its_share_and_counts_neither_as_wanted_nor_in_the_ledger(tools):
    play = tools.play()
    play.node("a", slots=4)
    effects = request(play, 5)
    leases = evals(tools, effects)
    assert [(lease.instance, lease.samples, lease.ticket) for lease in leases] == [(0, (0,), -1), (1, (0,), -1)]
    assert all(lease.policy == play.policies[0] and lease.sampling == GREEDY for lease in leases)
    assert [lease.ticket for lease in play.want("a", 1)] == [0]
    assert play.replay.ledger["issued"] == 2
    rewards = iter([1.0, 0.0, 1.0, 1.0, 0.0])
    finished = []
    while leases:
        effects = play.result(leases.pop(0), 0, reward=next(rewards))
        leases += evals(tools, effects)
        finished += tools.of(EvalFinished, effects)
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0]
    assert finished == [EvalFinished(play.policies[0], 5, 0.6, 0, 0.0, "eval", packed(rewards))]
    assert play.replay.eval_ledger["evaluated"] == 5
    assert play.replay.ready_bytes == 0


def test_nodes_that_serve_the_policy_come_first_and_others_take_what_is_left(tools):
    play = tools.play()
    play.node("old", slots=2)
    play.publish()
    play.node("new", slots=2)
    granted = tools.granted(request(play, 3))
    assert [node for node, _ in granted] == ["new", "old"]


def test_a_lost_nodes_evaluations_go_elsewhere_with_the_same_seed(tools):
    play = tools.play()
    play.node("a", slots=2)
    (first,) = evals(tools, request(play, 1))
    play.node("b", slots=2)
    (again,) = evals(tools, play.apply(NodeLost("a", "silent")))
    assert (again.instance, again.seeds) == (first.instance, first.seeds)
    assert play.replay.eval_ledger["dropped.node_lost"] == 1
    (finished,) = tools.of(EvalFinished, play.result(again, 0, "b", reward=1.0))
    assert (finished.n, finished.mean_reward) == (1, 1.0)


def test_at_its_time_out_the_rest_is_cancelled_counted_and_the_result_reported_with_its_n(tools):
    play = tools.play()
    play.node("a", slots=4)
    first, second = evals(tools, request(play, 6))
    play.result(first, 0, reward=1.0)
    play.now = 30.0
    effects = play.apply(Ticked())
    assert ("a", second.lease) in tools.cancelled(effects)
    rewards = packed([1.0, *[math.nan] * 5])
    assert tools.of(EvalFinished, effects) == [EvalFinished(play.policies[0], 1, 1.0, 5, 30.0, "eval", rewards)]
    assert play.replay.eval_ledger["dropped.cancelled"] == 2
    play.result(second, 0)
    assert play.replay.outside == {"late": 1}


def test_without_any_result_the_mean_is_not_a_number_rather_than_zero(tools):
    play = tools.play()
    play.publish()
    request(play, 2, timeout=1.0)
    play.now = 1.0
    (finished,) = tools.of(EvalFinished, play.apply(Ticked()))
    assert math.isnan(finished.mean_reward)
    assert (finished.n, finished.cancelled) == (0, 2)


def test_a_sample_of_another_policy_is_refused_and_one_that_keeps_failing_is_given_up_not_scored_zero(tools):
    play = tools.play(max_tries=2)
    play.publish()
    play.node("a", slots=2)
    (lease,) = evals(tools, request(play, 2, policy=play.policies[0]))
    (again,) = evals(tools, play.result(lease, 0, versions=(VersionRun(0, "d0", 3), VersionRun(0, "forged", 1))))
    assert again.instance == 0
    assert again.seeds != lease.seeds
    (other,) = evals(tools, play.result(again, 0, status="env_failed", versions=(), payload=b""))
    assert other.instance == 1
    (finished,) = tools.of(EvalFinished, play.result(other, 0, reward=0.5))
    assert (finished.n, finished.mean_reward, finished.cancelled) == (1, 0.5, 1)
    ledger = play.replay.eval_ledger
    assert (ledger["dropped.refused"], ledger["dropped.env_failed"], ledger["evaluated"]) == (1, 1, 1)


def test_evaluations_wait_their_turn_and_each_has_its_own_time(tools):
    play = tools.play()
    play.node("a", slots=2)
    (first,) = evals(tools, request(play, 1))
    assert evals(tools, request(play, 1)) == []  # the same again is the same
    play.publish()
    assert evals(tools, request(play, 1)) == []
    play.now = 29.0
    effects = play.result(first, 0)
    (second,) = evals(tools, effects)
    play.now = 31.0
    assert tools.of(EvalFinished, play.apply(Ticked())) == []
    assert "the evaluation of 1-d1 on eval waits for 1 of 1 samples" in play.replay.waiting(play.now)
    (finished,) = tools.of(EvalFinished, play.result(second, 0))
    assert finished.seconds == 2.0


def test_one_that_is_asked_again_with_other_samples_takes_the_place_of_what_waits_or_follows_what_runs(tools):
    play = tools.play()
    play.node("a", slots=2)
    (first,) = evals(tools, request(play, 1))
    request(play, 3)
    request(play, 2)
    effects = play.result(first, 0, reward=1.0)
    results = tools.of(EvalFinished, effects)
    leases = evals(tools, effects)
    while leases:
        effects = play.result(leases.pop(0), 0, reward=0.5)
        leases += evals(tools, effects)
        results += tools.of(EvalFinished, effects)
    assert [result.rewards for result in results] == [packed([1.0]), packed([0.5, 0.5])]
    assert play.replay.evaluations.idle


def test_evaluation_of_a_policy_never_published_ends_the_run(tools):
    play = tools.play()
    play.publish()
    (error,) = tools.errors(request(play, 1, policy=PolicyId("main", 9, "d9")))
    assert "never published" in error


def test_the_end_of_the_run_closes_an_evaluation_that_is_under_way(tools):
    play = tools.play()
    play.node("a", slots=2)
    (lease,) = evals(tools, request(play, 3))
    effects = play.apply(RunFinished("done"))
    assert tools.cancelled(effects) == [("a", lease.lease)]
    assert play.replay.eval_ledger["dropped.cancelled"] == 1


def test_nodes_with_one_copy_may_come_to_the_policy_but_not_back_to_it(tools):
    play = tools.play(one_copy=True)
    play.node("late", slots=4)
    play.publish()
    evaluated = play.publish()
    play.publish()
    play.node("beyond", slots=4)
    assert [node for node, _ in tools.granted(request(play, 9, policy=evaluated))] == ["late", "late"]
    play.apply(NodeJoined("there", 4))
    granted = tools.granted(play.apply(NodeAttested("there", evaluated)))
    assert [node for node, _ in granted] == ["there", "there"]


def test_what_is_left_of_an_evaluation_is_given_up_once_every_node_has_one_copy_of_a_later_policy(tools):
    play = tools.play(one_copy=True)
    play.node("a", slots=2)
    play.node("b", slots=2)
    (first, second) = evals(tools, request(play, 3))
    play.publish()
    play.attest("a")
    assert tools.of(EvalFinished, play.result(first, 0, reward=1.0)) == []  # sampled before it flipped; b may go on
    play.attest("b")
    (finished,) = tools.of(EvalFinished, play.result(second, 0, "b", reward=0.0))
    assert (finished.n, finished.mean_reward, finished.cancelled) == (2, 0.5, 1)


def test_an_evaluation_of_a_policy_that_every_node_has_passed_is_over_at_once(tools):
    play = tools.play(one_copy=True)
    passed = play.publish()
    play.publish()
    play.node("a", slots=2)
    (finished,) = tools.of(EvalFinished, request(play, 3, policy=passed) + play.apply(Ticked()))
    assert (finished.n, finished.cancelled) == (0, 3)


def test_a_node_with_one_copy_of_another_past_has_passed_that_version_too(tools):
    """The trainer has gone back: what the node serves is of a past that ended, and it flips again past its version."""
    play = tools.play(one_copy=True)
    play.publish()
    play.node("a", slots=2)
    again = PolicyId("main", play.policies[-1].version, "another past")
    play.apply(PolicyRegistered(again))
    (finished,) = tools.of(EvalFinished, request(play, 3, policy=again) + play.apply(Ticked()))
    assert (finished.n, finished.cancelled) == (0, 3)


def test_each_sample_of_each_instance_has_a_lease_and_a_seed_of_its_own_and_a_place_for_its_reward(tools):
    play = tools.play()
    play.node("a", slots=16)
    effects = play.apply(EvalRequested(play.policies[0], 2, GREEDY, 30.0, "hard", 3))
    leases = evals(tools, effects)
    assert [(lease.eval_set, lease.instance, lease.samples) for lease in leases] == [
        ("hard", instance, (0,)) for instance in (0, 0, 0, 1, 1, 1)
    ]
    assert len({lease.seeds for lease in leases}) == 6
    rewards = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5]
    for reward, lease in reversed(list(zip(rewards, leases, strict=True))):
        effects = play.result(lease, 0, reward=reward)
    (finished,) = tools.of(EvalFinished, effects)
    assert finished == EvalFinished(play.policies[0], 6, 0.5, 0, 0.0, "hard", packed(rewards))


def test_sets_of_one_version_are_evaluated_one_after_the_other_under_different_seeds(tools):
    play = tools.play()
    play.node("a", slots=2)
    (first,) = evals(tools, play.apply(EvalRequested(play.policies[0], 1, GREEDY, 30.0, "easy")))
    assert evals(tools, play.apply(EvalRequested(play.policies[0], 1, GREEDY, 30.0, "hard"))) == []
    assert evals(tools, play.apply(EvalRequested(play.policies[0], 1, GREEDY, 30.0, "easy"))) == []  # asked again
    effects = play.result(first, 0)
    (second,) = evals(tools, effects)
    assert [each.eval_set for each in tools.of(EvalFinished, effects)] == ["easy"]
    assert (second.eval_set, second.instance) == ("hard", first.instance)
    assert second.seeds != first.seeds
    assert [each.eval_set for each in tools.of(EvalFinished, play.result(second, 0))] == ["hard"]
    assert evals(tools, play.apply(Ticked())) == []


def test_a_sample_that_failed_is_asked_again_at_its_own_place_with_another_seed(tools):
    play = tools.play(max_tries=2)
    play.node("a", slots=4)
    first, second = evals(tools, play.apply(EvalRequested(play.policies[0], 1, GREEDY, 30.0, "hard", 2)))
    (again,) = evals(tools, play.result(second, 0, status="env_failed"))
    assert (again.instance, again.try_) == (0, 1)
    assert again.seeds != second.seeds
    play.result(again, 0, status="env_failed")  # and is given up
    (finished,) = tools.of(EvalFinished, play.result(first, 0, reward=1.0))
    assert (finished.n, finished.cancelled, finished.rewards) == (1, 1, packed([1.0, math.nan]))


def test_an_evaluation_larger_than_memory_should_hold_ends_the_run_before_anything_is_made(tools):
    play = tools.play()
    play.publish()
    play.apply(EvalRequested(play.policies[0], 1 << 20, GREEDY, 30.0, "hard", 1 << 20))
    assert "1048576 instances, 1048576 samples each" in play.replay.ended

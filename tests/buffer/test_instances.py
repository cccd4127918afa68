"""Which instance is asked: by difficulty as far as it is known, and none that has nothing left to teach."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.config import Config, ConfigError
from async_rl.tasks.registry import MAX_INSTANCES
from buffer.events import NodeLost
from buffer.instances import Instances, expected_spread, is_retired
from buffer.leases import train_instance
from buffer.rules import rules_from_config
from buffer.scenario import Constant, Lognormal, Scenario, TrainerSpeed
from buffer.simulate import simulate


def with_history(tools, history: list[tuple[int, int]], **changes) -> Instances:
    """(passed, attempts) of each."""
    instances = Instances(tools.rules(instances=len(history), **changes))
    for instance, (passed, attempts) in enumerate(history):
        for attempt in range(attempts):
            instances.note(instance, float(attempt < passed))
    return instances


@pytest.mark.parametrize(("passed", "attempts"), [(0, 0), (0, 8), (3, 8), (8, 8), (2.5, 4), (50, 100)])
def test_the_weight_is_the_expectation_over_what_the_pass_rate_may_be(passed, attempts):
    """Against the integral of p (1 - p) over the posterior density, on a grid."""
    p = (np.arange(200_000) + 0.5) / 200_000
    density = p**passed * (1 - p) ** (attempts - passed)
    expected = (p * (1 - p) * density).sum() / density.sum()
    assert expected_spread(passed, attempts) == pytest.approx(expected, rel=1e-6)


def test_instances_are_asked_in_proportion_to_their_weights(tools):
    history = [(0, 0), (0, 20), (10, 20), (20, 20), (5, 20)]
    instances = with_history(tools, history, weighted=True)
    weights = [expected_spread(passed, attempts) for passed, attempts in history]
    rounds = 8000
    asked = Counter(instances.choose(ticket, 0) for ticket in range(rounds))
    for instance, weight in enumerate(weights):
        probability = weight / sum(weights)
        error = math.sqrt(probability * (1 - probability) / rounds)
        assert abs(asked[instance] / rounds - probability) < 4 * error


def test_without_a_history_to_look_at_an_instance_is_the_hash_that_it_was(tools):
    instances = Instances(tools.rules())
    assert [instances.choose(ticket, 1) for ticket in range(50)] == [
        train_instance(7, ticket, 1) for ticket in range(50)
    ]


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_none_that_is_retired_is_asked_while_another_is_left_and_the_same_history_gives_the_same_choice(tools, data):
    count = data.draw(st.integers(1, 8))
    rules = tools.rules(
        instances=count, retire_above=data.draw(st.sampled_from([0.5, 0.9, 1.0])), retire_after=3,
        weighted=data.draw(st.booleans()),
    )  # fmt: skip
    one, other = Instances(rules), Instances(rules)
    history = data.draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.sampled_from([0.0, 0.7, 1.0, 3.0])), max_size=60)
    )
    attempts, passed = Counter[int](), Counter[int]()
    for instance, reward in history:
        for each in (one, other):
            each.note(instance, reward)
        attempts[instance] += 1
        passed[instance] += min(reward, 1.0)
    retired = {
        each for each in range(count) if attempts[each] >= 3 and passed[each] >= rules.retire_above * attempts[each]
    }
    assert {each for each in range(count) if one.is_retired(each)} == retired
    assert one.retired == len(retired)
    assert bool(one.why_none()) == (len(retired) == count)
    for ticket in range(20):
        chosen = one.choose(ticket, 0)
        assert chosen == other.choose(ticket, 0)
        assert 0 <= chosen < count
        assert chosen not in retired or len(retired) == count


def test_an_instance_is_retired_from_the_rate_and_the_number_of_attempts_on():
    assert not is_retired(9, 10, 0.9, 11)
    assert is_retired(9, 10, 0.9, 10)
    assert not is_retired(8.9, 10, 0.9, 10)
    assert not is_retired(10, 10, 0.0, 1)


def test_a_group_whose_instance_was_retired_while_a_sample_was_missing_starts_again_with_another(tools):
    """Its good attempt is dropped as retired, its lost one as lost; the try rises."""
    play = tools.play(groups_per_step=1, instances=2, retire_above=1.0, retire_after=2, steps=20)
    (lease,) = play.node("a", 1)
    play.result(lease, 0, reward=1.0)
    play.replay.groups.instances.note(lease.instance, 1.0)  # as another group of it would
    play.apply(NodeLost("a", "test"))
    assert play.replay.ledger["dropped.retired"] == 0
    (again,) = play.node("b", 1)
    assert (again.ticket, again.try_, again.samples, again.instance) == (0, 1, (0, 1), 1 - lease.instance)
    assert play.replay.ledger["dropped.retired"] == 1
    assert play.replay.ledger["dropped.node_lost"] == 1
    play.deliver(again, "b")
    assert play.draw()


def test_when_all_is_learned_the_run_ends_and_says_so(tools):
    play = tools.play(instances=1, retire_above=0.5, retire_after=2)
    (lease, _) = play.node("a", 4)
    play.deliver(lease, reward=1.0)
    play.want("a", 6)
    errors = tools.errors(play.want("a", 8))
    errors += [play.replay.ended]
    assert "all 1 instances of the task are retired" in errors[0]


@pytest.mark.parametrize("weighted", [False, True])
def test_with_retirement_and_weights_the_books_balance_after_every_event_and_the_easy_is_left_alone(tools, weighted):
    """Half the instances always pass: they are asked until that is known, and hardly after."""
    rules = tools.rules(
        steps=60, groups_per_step=4, max_staleness=4, group_size=4, zero_variance="refill", max_tries=100,
        instances=20, retire_above=0.9, retire_after=8, weighted=weighted,
    )  # fmt: skip
    scenario = Scenario(
        nodes=4, slots=4, lengths=Lognormal(30, 1), zero_variance=0.5, node_life_s=60, push_s=Constant(0.5),
        trainer=TrainerSpeed(Constant(1.0)),
    )  # fmt: skip
    result = simulate(rules, scenario, lambda replay, now: tools.audit(replay))
    assert (result.error, result.steps) == ("", 60)
    assert result.ledger["trained"] == 60 * 4 * 4
    assert result.ledger["issued"] == result.ledger["trained"] + sum(
        count for place, count in result.ledger.items() if place.startswith("dropped.")
    )
    # Ten easy instances of which each costs two groups, and what was under way when the second came back.
    assert 10 * 8 <= result.ledger["dropped.zero_variance"] <= 10 * 8 + 20 * 4


@pytest.mark.parametrize("keys", [{"retire_above": 0.9}, {"difficulty": "weighted"}])
def test_a_history_needs_instances_that_can_be_counted(keys):
    def config(**task) -> Config:
        buffer = type(Config().buffer)(**keys)
        return Config(buffer=buffer, task={"kind": "digit_sort", **task})

    with pytest.raises(ConfigError, match="has no end to its training instances"):
        rules_from_config(config())
    with pytest.raises(ConfigError, match=f"has {MAX_INSTANCES + 1} training instances"):
        rules_from_config(config(size=MAX_INSTANCES + 1))
    rules = rules_from_config(config(size=100))
    assert (rules.instances, rules.weighted, rules.retire_above) == (
        100, "difficulty" in keys, keys.get("retire_above", 0.0)
    )  # fmt: skip
    assert rules_from_config(Config(task={"kind": "digit_sort", "size": 100})).instances == 0

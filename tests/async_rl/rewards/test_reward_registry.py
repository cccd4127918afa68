"""[[task.reward]] tables become rewards, and these a weighted sum with its components by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config import ConfigError
from async_rl.rewards import RewardError, load_rewards
from async_rl.rewards.registry import MAX_REWARDS, Rewards, Weighted
from async_rl.tasks.task import Instance, Score

FOUR = Instance("2+2=", None, "4")


class Fixed:
    """A reward that is always the same, or what it was given to raise."""

    concurrency = 0
    seconds = 0.0

    def __init__(self, value: Any, concurrency: int = 0, seconds: float = 0.0) -> None:
        self.value, self.concurrency, self.seconds = value, concurrency, seconds

    def score(self, instance: Instance, completion: str) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_the_sum_is_weighted_and_every_value_is_recorded_by_name() -> None:
    rewards = load_rewards(
        [
            {"kind": "exact"},
            {"kind": "format", "pattern": "^.$", "weight": 0.5, "name": "short"},
            {"kind": "numeric", "extract": "whole", "absolute": 1, "weight": 0},
        ]
    )
    assert rewards.score(FOUR, "4") == Score(1.5, {"exact": 1.0, "short": 1.0, "numeric": 1.0})
    assert rewards.score(FOUR, "5") == Score(0.5, {"exact": 0.0, "short": 1.0, "numeric": 1.0})
    assert rewards.score(FOUR, "four") == Score(0.0, {"exact": 0.0, "short": 0.0, "numeric": 0.0})


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=MAX_REWARDS))
def test_any_weights_make_their_sum(parts: list[tuple[float, float]]) -> None:
    made = [Weighted(f"r{n}", weight, Fixed(value)) for n, (weight, value) in enumerate(parts)]
    score = Rewards(made).score(FOUR, "")
    assert score.reward == pytest.approx(math.fsum(weight * value for weight, value in parts), abs=1e-9)
    assert score.components == {f"r{n}": value for n, (_, value) in enumerate(parts)}


def test_components_of_a_reward_carry_its_name() -> None:
    rewards = Rewards([Weighted("code", 2.0, Fixed(Score(0.5, {"passed": 3})))])
    assert rewards.score(FOUR, "") == Score(1.0, {"code": 0.5, "code.passed": 3.0})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (ValueError("no"), "reward 'b': ValueError: no"),
        (RewardError("busy"), "reward 'b': busy"),
        (math.nan, "reward 'b': its value is nan"),
        (None, "reward 'b': TypeError"),
    ],
)
def test_one_that_fails_leaves_no_sum_and_is_named(value: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        Rewards([Weighted("a", 1.0, Fixed(1.0)), Weighted("b", 1.0, Fixed(value))]).score(FOUR, "")


def test_a_worker_asks_for_as_many_at_once_as_every_reward_that_waits_allows() -> None:
    def of(*limits: int) -> int:
        return Rewards([Weighted(f"r{n}", 1.0, Fixed(0.0, limit)) for n, limit in enumerate(limits)]).concurrency

    assert of(0, 0) == 1
    assert of(0, 16) == 16
    assert of(16, 4, 0) == 4
    assert Rewards([Weighted("a", 1.0, Fixed(0, 0, 30.0)), Weighted("b", 1.0, Fixed(0, 0, 5.0))]).seconds == 35.0


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([], "there must be 1 to 8"),
        ([{"kind": "exact"}] * 9, "there are 9"),
        ([{"kind": "exact"}] * 2, "2 of them are called 'exact'"),
        ([{}], "kind = None is not known"),
        ([{"kind": "numerics"}], "did you mean 'numeric'"),
        ([{"kind": "zzz"}], "known kinds: exact, numeric, format"),
        ([{"kind": "exact", "tolerance": 1}], "unknown key `tolerance`"),
        ([{"kind": "format"}], "required field `pattern`"),
        ([{"kind": "format", "pattern": ""}], "found everywhere"),
        ([{"kind": "format", "pattern": "("}], "no regular expression"),
        ([{"kind": "exact", "pattern": "a", "extract": "mark"}], "remove one of them"),
        ([{"kind": "exact", "weight": math.nan}], "weight = nan"),
        ([{"kind": "exact", "name": "a b"}], "name"),
        ([{"kind": "numeric", "relative": math.inf}], "endless tolerance"),
    ],
)
def test_tables_that_are_wrong_are_refused_with_advice(tables: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=r"\[\[task.reward\]\]") as error:
        load_rewards(tables)
    assert says in str(error.value)

"""mean@k and pass@k with their intervals, against exact arithmetic and against samples of a known truth."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.eval_stats import estimate, eval_record, evaluate, pass_at_k, wilson

NAN = math.nan


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
@settings(deadline=None)
def test_pass_at_k_is_the_formula_in_exact_arithmetic(counts: tuple[int, int, int]) -> None:
    n, correct, k = counts
    exact = 1 - Fraction(math.comb(n - correct, k), math.comb(n, k))
    assert pass_at_k(n, correct, k) == pytest.approx(float(exact), abs=1e-14)


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 3), (6, 1, 2), (4, 0, 4), (4, 4, 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_correct_one(n: int, correct: int, k: int) -> None:
    chosen = list(combinations(range(n), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(min(each) < correct for each in chosen) / len(chosen))


def test_of_one_sample_each_that_is_right_or_wrong_the_interval_is_wilsons() -> None:
    found = estimate([1.0] * 30 + [0.0] * 70, 1)
    assert found.value == 0.3
    assert found.interval == pytest.approx(wilson(0.3, 100))


def test_samples_of_an_instance_that_all_agree_say_no_more_than_one() -> None:
    rewards = np.array([[1.0] * 8] * 30 + [[0.0] * 8] * 70)
    mean, _ = evaluate(rewards, 1.0, ())
    assert mean.interval == pytest.approx(wilson(0.3, 100))


def test_samples_of_instances_that_are_all_alike_say_as_much_as_so_many_instances() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0]] * 50)
    mean, _ = evaluate(rewards, 1.0, ())
    assert mean.interval == pytest.approx(wilson(0.25, 200))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_nothing_varies_the_interval_is_that_of_the_instances_and_has_a_width(value: float) -> None:
    mean, passes = evaluate(np.full((20, 4), value), 1.0, (1, 4))
    assert mean.interval == pytest.approx(wilson(value, 20))
    assert passes[4].interval == pytest.approx(wilson(value, 20))


@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_an_interval_holds_its_value_and_of_rates_stays_within_them(instances: int, samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = (rng.random((instances, samples)) < rng.random((instances, 1))).astype(float)
    rewards[rng.random(rewards.shape) < 0.1] = NAN
    mean, passes = evaluate(rewards, 1.0, range(1, samples + 1))
    for found in (mean, *passes.values()):
        if found.instances:
            assert found.interval is not None
            assert 0 <= found.interval.low <= found.value + 1e-12
            assert found.value - 1e-12 <= found.interval.high <= 1
            assert found.interval.high - found.interval.low > 0


@pytest.mark.parametrize("spread", [0.3, 2.0, 30.0])
def test_the_interval_covers_the_truth_nineteen_times_of_twenty_however_alike_the_samples_of_an_instance_are(
    spread: float,
) -> None:
    """Success rates of instances are beta-distributed with mean 0.35, from all-or-nothing (0.3) to alike (30). With
    600 sets a coverage of 0.95 has a standard error of 0.009."""
    rng = np.random.default_rng(1)
    covered = {"mean": 0, "pass": 0}
    rate = rng.beta(0.35 * spread, 0.65 * spread, 400_000)
    truth = {"mean": 0.35, "pass": float(np.mean(1 - (1 - rate) ** 4))}
    for _ in range(600):
        rates = rng.beta(0.35 * spread, 0.65 * spread, (60, 1))
        mean, passes = evaluate((rng.random((60, 8)) < rates).astype(float), 1.0, (4,))
        for name, found in (("mean", mean), ("pass", passes[4])):
            assert found.interval is not None
            covered[name] += found.interval.low <= truth[name] <= found.interval.high
    assert covered["mean"] >= 0.92 * 600
    assert covered["pass"] >= 0.92 * 600


def test_of_rewards_beyond_0_and_1_the_interval_is_the_normal_one_over_instances() -> None:
    scores = [-1.0, 0.5, 2.0, 3.5]
    found = estimate(scores, 1)
    half = 1.959964 * float(np.std(scores, ddof=1)) / 2
    assert found.interval == pytest.approx((1.25 - half, 1.25 + half))
    assert estimate([7.0], 1).interval is None


def test_what_was_cancelled_is_counted_and_counts_for_nothing() -> None:
    rewards = np.array([[1.0, NAN, 0.0], [0.5, 1.5, 1.0], [NAN, NAN, NAN]])
    record = eval_record(7, "aime", rewards, 1.0, (1, 2, 3))
    assert (record["n"], record["cancelled"], record["instances"], record["samples"]) == (5, 4, 2, 3)
    assert record["reward"] == pytest.approx((0.5 + 1.0) / 2)
    assert record["pass"]["2"]["value"] == pytest.approx((1.0 + 1.0) / 2)
    assert record["pass"]["3"] == {"value": 1.0, "interval": list(wilson(1.0, 1)), "n": 1}
    nothing = eval_record(7, "aime", np.full((2, 2), NAN), 1.0, (1,))
    assert math.isnan(nothing["reward"])
    assert (nothing["n"], nothing["interval"], nothing["pass"]["1"]["n"]) == (0, None, 0)


def test_what_passes_is_a_matter_of_the_threshold() -> None:
    rewards = np.array([[0.4, 0.9], [0.2, 0.1]])
    assert evaluate(rewards, 0.9, (1,))[1][1].value == 0.25
    assert evaluate(rewards, 0.2, (1, 2))[1][2].value == 1.0

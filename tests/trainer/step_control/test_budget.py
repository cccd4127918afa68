from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.step_control.budget import FLOOR, averaged, budget_at, left_of, noise_of, scale_for, smoothed

BUDGETS = st.floats(1e-8, 1.0)
DIVERGENCES = st.floats(0.0, 1e6)


@given(st.integers(1, 500), BUDGETS, BUDGETS)
def test_the_budget_leads_from_the_first_to_the_last_and_never_back(steps: int, first: float, last: float) -> None:
    first, last = max(first, last), min(first, last)
    budgets = [budget_at(step, steps, first, last) for step in range(steps + 3)]
    assert budgets[0] == pytest.approx(first)
    if steps > 1:
        assert budgets[steps - 1 :] == pytest.approx([last] * 4)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(budgets))


def test_the_budget_is_half_way_in_the_middle() -> None:
    assert budget_at(50, 101, 2e-4, 2e-5) == pytest.approx(1.1e-4)


@pytest.mark.parametrize(("step", "steps"), [(-1, 3), (0, 0)])
def test_there_is_no_budget_of_a_step_that_does_not_exist(step: int, steps: int) -> None:
    with pytest.raises(ValueError, match="steps count from 0"):
        budget_at(step, steps, 1.0, 1.0)


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30))
def test_the_running_mismatch_stays_between_nothing_and_the_largest_observed(observed: list[float]) -> None:
    mismatch = 0.0
    for each in observed:
        mismatch = smoothed(mismatch, each)
        assert 0.0 <= mismatch <= max(0.0, *observed)


def test_the_running_mismatch_is_seven_parts_old_and_three_new() -> None:
    assert smoothed(1.0, 2.0) == pytest.approx(1.3)


@given(BUDGETS, DIVERGENCES)
def test_engines_use_up_at_most_half_of_the_budget(budget: float, mismatch: float) -> None:
    left = left_of(budget, mismatch)
    assert FLOOR * budget <= left <= budget
    assert left == pytest.approx(max(budget - mismatch, budget / 2))


@given(st.floats(1e-12, 1e6), BUDGETS, st.floats(0.5, 10.0))
def test_the_scaled_step_meets_its_budget_or_is_as_long_as_it_may_be(
    divergence: float, budget: float, largest: float
) -> None:
    scale = scale_for(divergence, budget, largest)
    assert 0 < scale <= largest
    applied = divergence * scale * scale
    assert applied <= budget * (1 + 1e-9)
    assert scale == largest or applied == pytest.approx(budget)


@given(st.floats(1e-12, 1e6), BUDGETS, st.floats(0.5, 10.0), DIVERGENCES)
def test_with_what_storing_it_costs_the_scaled_step_meets_its_budget_too(
    divergence: float, budget: float, largest: float, noise: float
) -> None:
    scale = scale_for(divergence, budget, largest, noise)
    assert 0 < scale <= scale_for(divergence, budget, largest)
    used = divergence * scale * scale + noise * scale
    assert used <= budget * (1 + 1e-9)
    assert scale == largest or used == pytest.approx(budget)


@given(st.floats(1e-12, 1.0), st.floats(0.0, 1.0), st.floats(1e-9, 1e3))
def test_what_storing_costs_is_learnt_from_one_step_for_all(predicted: float, noise: float, scale: float) -> None:
    applied = predicted * scale * scale
    seen = noise_of(applied, applied + noise * scale, scale)
    assert seen == pytest.approx(noise, rel=1e-6, abs=1e-9 * predicted * scale)


def test_a_step_that_moved_less_than_predicted_or_not_at_all_tells_of_no_noise() -> None:
    assert noise_of(2e-4, 1e-4, 1.0) == 0.0
    assert noise_of(0.0, 1e-4, 0.0) == 0.0


def test_the_first_step_says_what_storing_costs_and_later_ones_three_parts_in_ten() -> None:
    assert averaged(None, 2.0) == 2.0
    assert averaged(1.0, 2.0) == pytest.approx(1.3)


def test_a_step_that_changes_nothing_is_left_as_it_is() -> None:
    assert scale_for(0.0, 1e-4, 3.0) == 1.0
    assert scale_for(0.0, 1e-4, 3.0, noise=1.0) == 1.0  # and nothing of it is stored
    assert scale_for(5e-324, 1e-4, 3.0) == 3.0


@pytest.mark.parametrize("divergence", [math.nan, math.inf, -1e-9])
def test_a_divergence_that_cannot_be_is_refused(divergence: float) -> None:
    with pytest.raises(FloatingPointError, match="predicted divergence"):
        scale_for(divergence, 1e-4, 3.0)

"""Advantages against an oracle of plain loops over floats, and the rules that hold for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import AsyncRLError
from trainer.algorithm.advantages import ADVANTAGES, batch_normalised

GROUP_BASED = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline")
BATCH_BASED = ("reinforce_pp", "batch_mean")
SCALED = ("grpo", "reinforce_pp", "reinforce_pp_baseline")
EPSILON = 1e-6

# Tenths, so that equal rewards occur and no two different ones are within a rounding of each other.
batches = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=24)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def oracle(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    group = [[r for r, g in zip(rewards, groups, strict=True) if g == mine] for mine in groups]
    centred = [r - mean(members) for r, members in zip(rewards, group, strict=True)]
    match name:
        case "grpo":
            return [c / (deviation(members) + EPSILON) for c, members in zip(centred, group, strict=True)]
        case "dr_grpo":
            return centred
        case "rloo":
            sums = [(math.fsum(members), len(members)) for members in group]
            return [r - (s - r) / (n - 1) if n > 1 else 0.0 for r, (s, n) in zip(rewards, sums, strict=True)]
        case "maxrl":
            return [c / mean(members) if mean(members) else 0.0 for c, members in zip(centred, group, strict=True)]
        case "reinforce_pp_baseline":
            return [c / (deviation(centred) + EPSILON) for c in centred]
        case "batch_mean":
            return [r - mean(rewards) for r in rewards]
        case "reinforce_pp":
            return [(r - mean(rewards)) / (deviation(rewards) + EPSILON) for r in rewards]
    raise AssertionError(name)


def advantages(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    out = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64))
    assert out.dtype == torch.float64
    return out.tolist()


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=50)
@given(batch=batches)
def test_advantages_equal_the_oracle(name: str, batch: list[tuple[int, int]]) -> None:
    rewards, groups = [tenths / 10 for tenths, _ in batch], [group for _, group in batch]
    assert advantages(name, rewards, groups) == pytest.approx(oracle(name, rewards, groups), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=50)
@given(value=st.floats(0, 1e6), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_equal_rewards_give_exactly_zero(name: str, value: float, sizes: list[int]) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    assert advantages(name, [value] * len(groups), groups) == [0.0] * len(groups)


@pytest.mark.parametrize("name", GROUP_BASED)
@settings(max_examples=50)
@given(batch=batches)
def test_a_group_of_equal_rewards_gets_zero_whatever_its_neighbours_got(
    name: str, batch: list[tuple[int, int]]
) -> None:
    rewards, groups = [0.1] * 3 + [tenths / 10 for tenths, _ in batch], [9] * 3 + [group for _, group in batch]
    assert advantages(name, rewards, groups)[:3] == [0.0] * 3


@pytest.mark.parametrize("name", GROUP_BASED)
def test_what_is_left_alone_of_its_group_learns_nothing(name: str) -> None:
    """Its companions were stale, or failed; group 1 is gone altogether."""
    out = advantages(name, [0.7, 1.0, 0.0], [0, 2, 2])
    assert out[0] == 0.0
    assert out[1] > 0 > out[2]


@pytest.mark.parametrize("name", BATCH_BASED)
def test_single_attempts_are_compared_with_the_batch(name: str) -> None:
    assert advantages(name, [1.0], [0]) == [0.0]
    out = advantages(name, [1.0, 0.0, 0.0], [0, 1, 2])
    assert out[0] > 0 > out[1] == out[2]


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=50)
@given(batch=batches, factor=st.sampled_from([1e-2, 1e3, 1e150]))
def test_advantages_have_mean_zero_and_grow_with_the_rewards_unless_they_are_scaled(
    name: str, batch: list[tuple[int, int]], factor: float
) -> None:
    rewards, groups = [tenths / 10 for tenths, _ in batch], [group for _, group in batch]
    plain = advantages(name, rewards, groups)
    scaled = advantages(name, [reward * factor for reward in rewards], groups)
    assert all(math.isfinite(value) for value in scaled)
    assert mean(plain) == pytest.approx(0.0, abs=1e-9)
    if name in SCALED:
        assert scaled == pytest.approx(plain, rel=1e-2, abs=1e-9)
    elif name != "maxrl":
        assert scaled == pytest.approx([value * factor for value in plain], rel=1e-6, abs=1e-9 * factor)


def test_an_empty_batch_has_no_advantages() -> None:
    for name in ADVANTAGES:
        assert advantages(name, [], []) == []
    assert batch_normalised(torch.zeros(0, dtype=torch.float64)).tolist() == []


def test_maxrl_counts_a_prompt_by_the_inverse_of_its_pass_rate() -> None:
    rare = advantages("maxrl", [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8)
    assert rare == [7.0] + [-1.0] * 7
    assert advantages("maxrl", [1, 1, 1, 0], [0] * 4) == pytest.approx([1 / 3] * 3 + [-1])
    assert advantages("maxrl", [0, 0], [0, 0]) == [0, 0]


def test_maxrl_refuses_a_negative_reward_and_says_what_to_use() -> None:
    with pytest.raises(AsyncRLError, match=r"maxrl.*one is -0.5.*rloo"):
        advantages("maxrl", [1.0, -0.5], [0, 0])


@settings(max_examples=50)
@given(batch=batches)
def test_batch_normalisation_divides_by_the_deviation_and_keeps_zeros(batch: list[tuple[int, int]]) -> None:
    rewards, groups = [tenths / 10 for tenths, _ in batch], [group for _, group in batch]
    plain = advantages("dr_grpo", rewards, groups)
    normalised = batch_normalised(torch.tensor(plain, dtype=torch.float64)).tolist()
    assert normalised == pytest.approx([value / (deviation(plain) + EPSILON) for value in plain], rel=1e-9, abs=1e-9)
    assert [value == 0 for value in normalised] == [value == 0 for value in plain]

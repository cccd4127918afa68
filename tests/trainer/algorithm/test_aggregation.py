"""Aggregation against means written out, and the same from parts: micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.aggregation import AGGREGATIONS, Denominators, denominators

LENGTH = 12
# (group, sizes of its attempts): an attempt belongs to one group.
batches = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5)


def flat(batch: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    attempts, groups, number = [], [], 0
    for group, sizes in enumerate(batch):
        for size in sizes:
            attempts += [number] * size
            groups += [2 * group] * size  # with gaps, where all of a group was dropped
            number += 1
    return torch.tensor(attempts), torch.tensor(groups)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def oracle(name: str, losses: list[float], batch: list[list[int]]) -> float:
    rest = list(losses)
    nested = [[[rest.pop(0) for _ in range(size)] for size in sizes] for sizes in batch]
    attempts = [attempt for group in nested for attempt in group]
    return {
        "token_mean": mean([loss for attempt in attempts for loss in attempt]),
        "sequence_mean": mean([mean(attempt) for attempt in attempts]),
        "prompt_mean": mean([mean([loss for attempt in group for loss in attempt]) for group in nested]),
        "constant": mean([sum(attempt) / LENGTH for attempt in attempts]),
    }[name]


def losses_of(n: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=n))


@pytest.mark.parametrize("name", AGGREGATIONS)
@settings(max_examples=50)
@given(batch=batches)
def test_the_coefficients_give_the_mean_that_is_meant(name: str, batch: list[list[int]]) -> None:
    attempt, group = flat(batch)
    losses = losses_of(len(attempt))
    weights = AGGREGATIONS[name](attempt, group, denominators(attempt, group), LENGTH)
    assert weights.dtype == torch.float64
    assert float((weights * losses).sum()) == pytest.approx(oracle(name, losses.tolist(), batch), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", AGGREGATIONS)
@settings(max_examples=50)
@given(batch=batches, cut=st.integers(0, 5))
def test_two_ranks_with_summed_counts_give_the_whole_batch(name: str, batch: list[list[int]], cut: int) -> None:
    attempt, group = flat(batch)
    whole = AGGREGATIONS[name](attempt, group, denominators(attempt, group), LENGTH)
    first = group < 2 * cut
    parts = [(attempt[mine], group[mine]) for mine in (first, ~first)]
    of = Denominators(*(sum(counts) for counts in zip(*(denominators(*part) for part in parts), strict=True)))
    split = torch.zeros_like(whole)
    for mine, part in zip((first, ~first), parts, strict=True):
        split[mine] = AGGREGATIONS[name](*part, of, LENGTH)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_batch_has_no_coefficients(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert denominators(nothing, nothing) == (0, 0, 0)
    assert AGGREGATIONS[name](nothing, nothing, denominators(nothing, nothing), LENGTH).shape == (0,)


def test_a_constant_of_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length of 0"):
        AGGREGATIONS["constant"](torch.tensor([0]), torch.tensor([0]), Denominators(1, 1, 1), 0)

"""Whether what trains is as long as what was sampled: a distance, and an interval that holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.run.lengths import added, histogram, length_bias, length_bin, waste

LENGTHS = st.lists(st.integers(1, 40000), min_size=1, max_size=60)


@given(st.integers(0, 10**6))
def test_a_bin_is_no_longer_than_its_answers_and_within_one_in_128(tokens: int) -> None:
    assert 0 <= tokens - length_bin(tokens) <= tokens / 128
    assert length_bin(length_bin(tokens)) == length_bin(tokens)
    assert tokens >= 256 or length_bin(tokens) == tokens


@given(LENGTHS, LENGTHS)
def test_the_distance_is_that_of_the_two_empirical_distributions(issued: list[int], trained: list[int]) -> None:
    one, other = ([length_bin(length) for length in lengths] for lengths in (issued, trained))
    places = sorted({*one, *other})
    expected = max(abs(np.mean([x <= p for x in one]) - np.mean([x <= p for x in other])) for p in places)
    found = length_bias(histogram(issued), histogram(trained))
    assert found is not None
    assert found["ks"] == pytest.approx(expected, abs=1e-4)
    low, high = found["interval"]
    assert 0 <= low <= found["ks"] <= high <= 1


def test_the_interval_holds_the_true_distance() -> None:
    """Answers of 1 to 100 tokens, of which every one above 80 is dropped: the true distance is 0.2."""
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(40):
        issued = random.integers(1, 101, 4000).tolist()
        found = length_bias(histogram(issued), histogram(length for length in issued if length <= 80))
        assert found is not None
        hits += found["interval"][0] <= 0.2 <= found["interval"][1]
        assert found["interval"][0] > 0.1
    assert hits == 40


def test_without_a_bias_zero_is_in_the_interval() -> None:
    issued = np.random.default_rng(1).integers(1, 101, 4000).tolist()
    found = length_bias(histogram(issued), histogram(issued[::2]))
    assert found is not None
    assert found["interval"][0] == 0.0
    assert (found["sampled"], found["trained"]) == (4000, 2000)


def test_waste_is_the_share_of_tokens_and_histograms_add_up() -> None:
    assert waste(histogram([10, 30]), histogram([10])) == 0.75
    assert waste({}, {}) is None
    assert length_bias({}, histogram([1])) is None
    assert added([{1: 2}, {1: 1, 5: 1}]) == {1: 3, 5: 1}

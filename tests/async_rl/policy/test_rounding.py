"""Stochastic rounding: the stream of the design, the same from numpy and torch, unbiased, and safe at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.policy.philox import philox4x32
from async_rl.policy.rounding import noise, noise_numpy, round_bfloat16, round_bfloat16_numpy, rounding_key

KEY = rounding_key(1, 2, "layer")
patterns = st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=50)


@pytest.mark.parametrize("element", [0, 1, 7, 8, 12345, 2**35 - 1, 2**35, 2**40 + 3])
def test_an_element_takes_the_half_word_that_the_design_names(element: int) -> None:
    call = element // 8
    word = int(philox4x32(np.array([call % 2**32, call >> 32, 1, 0], np.uint32), KEY)[element % 8 // 2])
    expected = word >> 16 if element % 2 else word & 0xFFFF
    assert int(noise_numpy(KEY, np.array([element]), 1)[0, 0]) == expected
    assert int(noise(KEY, torch.tensor([element]), 1)[0, 0]) == expected


@given(st.lists(st.integers(0, 2**41), min_size=0, max_size=5), st.integers(0, 40))
def test_torch_draws_the_noise_that_numpy_draws(first: list[int], columns: int) -> None:
    drawn = noise(KEY, torch.tensor(first, dtype=torch.int64), columns)
    assert np.array_equal(drawn.numpy(), noise_numpy(KEY, np.array(first, np.int64), columns).astype(np.int32))


@given(patterns, st.integers(0, 0xFFFF))
def test_numpy_and_torch_round_any_pattern_to_the_same_bits(bits: list[int], random: int) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    expected = round_bfloat16_numpy(values, np.full(len(bits), random, np.uint32))
    rounded = round_bfloat16(torch.from_numpy(values.copy()), torch.full((len(bits),), random, dtype=torch.int32))
    assert np.array_equal(rounded.view(torch.int16).numpy().view(np.uint16), expected)


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFF))
def test_a_number_goes_to_one_of_its_two_neighbours_and_stays_finite(bits: int, random: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    rounded = (round_bfloat16_numpy(value, np.array([random])).astype(np.uint32) << 16).view(np.float32)
    if np.isnan(value[0]):
        assert np.isnan(rounded[0])
    elif np.isinf(value[0]):
        assert rounded[0] == value[0]
    else:
        assert np.isfinite(rounded[0])
        below = np.array([bits & 0xFFFF0000], np.uint32)
        above = below + np.uint32(0x10000)
        assert rounded[0] in (below.view(np.float32)[0], above.view(np.float32)[0])


def test_what_bfloat16_holds_already_is_never_changed() -> None:
    values = torch.randn(1000).bfloat16()
    for random in (0, 1, 0xFFFF):
        assert torch.equal(round_bfloat16(values.float(), torch.full((1000,), random, dtype=torch.int32)), values)


def test_the_mean_of_what_is_stored_is_what_was_meant() -> None:
    """Over 200 streams; the rounding error of one is uniform to within one unit, so 4 standard errors are 4·½/√200."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 500)).astype(np.float32))
    first = torch.arange(4) * 500
    total = torch.zeros(4, 500, dtype=torch.float64)
    for update in range(200):
        total += round_bfloat16(values, noise(rounding_key(0, update, "layer"), first, 500)).double()
    unit = torch.exp2(torch.floor(torch.log2(values.abs().double())) - 7)
    error = (total / 200 - values.double()) / unit
    assert error.abs().max() < 4.5 * 0.5 / 200**0.5
    assert error.mean().abs() < 4 * 0.5 / (200 * 2000) ** 0.5

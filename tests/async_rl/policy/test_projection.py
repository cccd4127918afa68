"""The words and signs that everybody has to draw alike: published vectors, golden values, numpy against torch."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import AsyncRLError
from async_rl.policy.philox import philox4x32, philox4x32_torch
from async_rl.policy.projection import projection_key, signs, signs_numpy, signs_torch

FULL = 0xFFFFFFFF
# Random123, known-answer tests of philox4x32-10: counter, key, words.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
words = st.integers(0, FULL)


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(map(int, philox4x32(np.array(counter, np.uint32), key))) == expected
    assert tuple(philox4x32_torch(torch.tensor(counter), key).tolist()) == expected


def by_the_book(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The paper's round function with Python's whole numbers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & FULL, first >> 32 ^ c[3] ^ k[1], first & FULL]
        k = [(k[0] + 0x9E3779B9) & FULL, (k[1] + 0xBB67AE85) & FULL]
    return tuple(c)


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_numpy_and_torch_compute_philox_as_whole_numbers_do(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> None:
    expected = by_the_book(counter, key)
    assert tuple(map(int, philox4x32(np.array(counter, np.uint32), key))) == expected
    assert tuple(philox4x32_torch(torch.tensor(counter), key).tolist()) == expected


def test_a_key_is_of_the_seed_the_update_and_the_name() -> None:
    assert projection_key(7, 3, "model.layers.0.self_attn.q_proj") == (0xE22AAE68, 0x5246EE50)
    keys = {projection_key(*parts) for parts in [(7, 3, "a"), (3, 7, "a"), (7, 3, "b"), (8, 3, "a"), (7, 4, "a")]}
    assert len(keys) == 5


def test_the_signs_are_these() -> None:
    drawn = signs_numpy(projection_key(7, 3, "model.layers.0.self_attn.q_proj"), 5, 0, 300)
    assert "".join("+-"[int(sign < 0)] for sign in drawn[0, :40]) == "--+-+++-++---++--+-+-++-+-----+++--+-++-"
    assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == "5aad7e26597ed501"


def test_a_sign_is_the_bit_that_the_design_names() -> None:
    key = projection_key(1, 2, "layer")
    drawn = signs_numpy(key, 3, 0, 400)
    for row, column in [(0, 0), (0, 31), (1, 32), (2, 127), (2, 128), (1, 399)]:
        word = column // 32
        lanes = by_the_book((word // 4, row, 0, 0), key)
        assert drawn[row, column] == (1 if lanes[word % 4] >> (column % 32) & 1 else -1)


@given(st.integers(1, 70), st.integers(0, 700), st.integers(0, 300), st.integers(0, 2**63))
def test_torch_draws_the_signs_that_numpy_draws(rank: int, start: int, count: int, seed: int) -> None:
    key = projection_key(seed, 0, "layer")
    expected = signs_numpy(key, rank, start, start + count)
    assert np.array_equal(signs(key, rank, start, start + count).numpy(), expected)
    drawn = signs_torch(key, rank, start, start + count, "cpu")
    assert drawn.dtype == torch.int8
    assert drawn.shape == (rank, count)
    assert np.array_equal(drawn.numpy(), expected)


@given(st.integers(1, 20), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_shards_of_columns_draw_the_parts_of_the_whole(rank: int, counts: list[int]) -> None:
    key = projection_key(1, 2, "layer")
    edges = np.cumsum([0, *counts])
    parts = [signs(key, rank, int(a), int(b)) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts, dim=1), signs(key, rank, 0, int(edges[-1])))


def test_a_smaller_rank_draws_the_first_rows_of_a_larger_one() -> None:
    key = projection_key(1, 2, "layer")
    assert torch.equal(signs(key, 4, 0, 100), signs(key, 9, 0, 100)[:4])


def test_the_mean_over_updates_of_the_projection_back_and_forth_is_the_identity() -> None:
    """E[Aᵀ A] = I: the sketch of a gradient is unbiased. 4 standard errors, of 1/√(updates · rank) each."""
    updates, rank, columns = 400, 8, 24
    total = torch.zeros(columns, columns, dtype=torch.float64)
    for update in range(updates):
        drawn = signs(projection_key(0, update, "layer"), rank, 0, columns).double()
        total += drawn.T @ drawn / rank
    assert (total / updates - torch.eye(columns)).abs().max() < 4.5 / (updates * rank) ** 0.5


@pytest.mark.parametrize(("rank", "start", "stop"), [(0, 0, 1), (513, 0, 1), (1, -1, 1), (1, 2, 1)])
def test_a_projection_that_cannot_be_is_refused(rank: int, start: int, stop: int) -> None:
    for draw in (signs, signs_numpy):
        with pytest.raises(AsyncRLError, match=r"projection: (rank|columns)"):
            draw((0, 0), rank, start, stop)

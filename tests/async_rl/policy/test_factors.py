"""Factors: encoding as the design says, and an application that gives the same bits however it is computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from golden_updates import ENDS, SENT, Key, after_ten_updates, bits
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import AsyncRLError
from async_rl.policy import factors as factors_module
from async_rl.policy.factors import Factors, apply_, apply_numpy, decode, encode, power_of_two
from async_rl.policy.projection import projection_key, signs_numpy
from async_rl.policy.rounding import rounding_key

KEY = projection_key(1, 2, "layer")
ROUNDING = rounding_key(1, 2, "layer")
SHAPES = [(1, 1), (3, 31), (65, 33), (3, 257), (65, 1), (2, 3, 257), (3, 1, 33)]


def random_factors(shape: tuple[int, ...], rank: int, seed: int = 0) -> Factors:
    """Of a change that varies by orders of magnitude from row to row, with a row of zeros where there are three."""
    generator = np.random.default_rng(seed)
    rows = np.exp(generator.normal(size=(*shape[:-1], 1)) * 3) * 1e-3
    change = torch.from_numpy((generator.normal(size=(*shape[:-1], rank)) * rows).astype(np.float32))
    if shape[-2] >= 3:
        change[..., 1, :] = 0.0
    return encode(change)


def random_weight(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)) * 0.02
    if shape[-2] >= 3:
        weight[..., 1, ::2] = -0.0
    return weight.to(dtype)


def rounding_for(dtype: torch.dtype) -> tuple[int, int] | None:
    return ROUNDING if dtype == torch.bfloat16 else None


def by_numpy(weight: torch.Tensor, factors: Factors) -> np.ndarray:
    """The bits after the plainest form of the rule."""
    patterns = bits(weight)
    changed = patterns.view(np.uint16 if weight.dtype == torch.bfloat16 else np.float32)
    apply_numpy(changed, factors.q.numpy(), factors.s.numpy(), KEY, rounding=rounding_for(weight.dtype))
    return patterns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 7, 512])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_and_numpy_change_a_weight_to_the_same_bits(
    shape: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    factors, weight = random_factors(shape, rank), random_weight(shape, dtype)
    expected = by_numpy(weight, factors)
    apply_(weight, factors, KEY, rounding=rounding_for(dtype))
    assert np.array_equal(bits(weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_of_rows_and_of_columns_are_the_parts_of_the_whole(shards: int, dtype: torch.dtype) -> None:
    shape = (65, 257)
    factors, whole = random_factors(shape, 16), random_weight(shape, dtype)
    by_rows, by_columns = whole.clone(), whole.clone()
    rounding = rounding_for(dtype)
    apply_(whole, factors, KEY, rounding=rounding)
    first = 0
    for part, q, s in zip(by_rows.chunk(shards), factors.q.chunk(shards), factors.s.chunk(shards), strict=True):
        apply_(part, Factors(q, s), KEY, first_row=first, rounding=rounding)
        first += len(part)
    start = 0
    for part in by_columns.chunk(shards, dim=1):
        apply_(part, factors, KEY, start=start, total_columns=257, rounding=rounding)
        start += part.shape[1]
    assert np.array_equal(bits(by_rows), bits(whole))
    assert np.array_equal(bits(by_columns), bits(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_blocks_nor_threads_nor_strides_change_a_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (65, 257)
    factors, weight = random_factors(shape, 64), random_weight(shape, dtype)
    expected = by_numpy(weight, factors)
    rounding = rounding_for(dtype)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        apply_(again := weight.clone(), factors, KEY, rounding=rounding)
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(bits(again), expected)

    strided = torch.zeros(257, 2 * 65, dtype=dtype)[:, ::2].T
    apply_(strided.copy_(weight), factors, KEY, rounding=rounding)
    assert not strided.is_contiguous()
    assert np.array_equal(bits(strided), expected)

    monkeypatch.setattr(factors_module, "BLOCK_COLUMNS", 30)
    monkeypatch.setattr(factors_module, "BLOCK_ELEMENTS", 100)
    apply_(weight, factors, KEY, rounding=rounding)
    assert np.array_equal(bits(weight), expected)


def test_experts_share_a_projection_and_a_row_block_of_a_fused_weight_is_a_weight() -> None:
    fused = random_weight((3, 10, 33), torch.bfloat16)
    before = fused.clone()
    factors = random_factors((3, 5, 33), 4)
    apply_(fused[:, 5:], factors, KEY, rounding=ROUNDING)
    assert torch.equal(fused[:, :5], before[:, :5])
    for expert in range(3):
        alone = before[expert, 5:].clone()
        apply_(alone, Factors(factors.q[expert], factors.s[expert]), KEY, first_row=5 * expert, rounding=ROUNDING)
        assert np.array_equal(bits(alone), bits(fused[expert, 5:]))


def test_a_weight_changes_by_what_the_factors_say_rounded_once() -> None:
    """Against float64, which holds both terms whole: the result is the float32 nearest to their difference."""
    factors, weight = random_factors((65, 257), 512), random_weight((65, 257), torch.float32)
    sign = signs_numpy(KEY, 512, 0, 257).astype(np.float64)
    whole = weight.numpy().astype(np.float64) - factors.s.numpy().astype(np.float64)[:, None] * (
        factors.q.numpy().astype(np.float64) @ sign
    )
    apply_(weight, factors, KEY)
    assert np.array_equal(weight.numpy(), whole.astype(np.float32))


def test_the_largest_sums_are_exact() -> None:
    """Rank 512 with every q at its end and its sign matched: 512 · 32767 < 2²⁴."""
    sign = signs_numpy(KEY, 512, 0, 8)
    q = torch.from_numpy(sign.T.astype(np.int16) * 32767).contiguous()
    weight = torch.zeros(8, 8)
    apply_(weight, Factors(q, torch.ones(8)), KEY)
    assert weight.diagonal().tolist() == [-512.0 * 32767] * 8
    assert np.array_equal(weight.numpy(), -(q.numpy().astype(np.int64) @ sign.astype(np.int64)))


def test_an_application_in_the_midst_of_less_exact_products_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs and GPUs that would obey, "medium" cuts q to 8 bits; so the product must be formed without it."""
    factors, weight = random_factors((65, 257), 64), random_weight((65, 257), torch.float32)
    expected = by_numpy(weight, factors)
    under = []
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *a, **k: (under.append(torch.get_float32_matmul_precision()), product(*a, **k))[1]
    )
    torch.set_float32_matmul_precision("medium")
    try:
        apply_(weight, factors, KEY)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert under == ["highest"]
    assert np.array_equal(bits(weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_after_ten_updates_are_these(dtype: torch.dtype) -> None:
    def by_torch(weight: torch.Tensor, factors: Factors, key: Key, rounding: Key | None) -> None:
        apply_(weight, factors, key, rounding=rounding)

    def by_integers(weight: torch.Tensor, factors: Factors, key: Key, rounding: Key | None) -> None:
        patterns = bits(weight)
        changed = patterns.view(np.uint16 if rounding else np.float32)
        apply_numpy(changed, factors.q.numpy(), factors.s.numpy(), key, rounding=rounding)
        weight.copy_(torch.from_numpy(patterns).view(dtype))

    for apply in (by_torch, by_integers):
        assert after_ten_updates(apply, dtype) == (SENT, ENDS[dtype])


magnitudes = st.floats(-38, 20).map(lambda exponent: 10**exponent)


@given(st.integers(1, 512), st.lists(magnitudes, min_size=1, max_size=4), st.integers(0, 1000))
def test_a_scale_is_the_smallest_power_of_two_that_holds_its_row(rank: int, sizes: list[float], seed: int) -> None:
    change = np.random.default_rng(seed).uniform(-1, 1, size=(len(sizes), rank)) * np.array(sizes)[:, None]
    q, s = encode(torch.from_numpy(change.astype(np.float32)))
    wanted = change.astype(np.float32).astype(np.float64) / math.sqrt(rank)
    for row in range(len(sizes)):
        scale = float(s[row])
        assert math.frexp(scale)[0] == 0.5
        assert scale >= 2.0**-100
        assert np.abs(wanted[row]).max() <= 32767 * scale * (1 + 1e-12)
        if scale > 2.0**-100:
            assert np.abs(wanted[row]).max() > 32767 * scale / 2 * (1 - 1e-12)
        assert np.abs(wanted[row] - scale * q[row].numpy().astype(np.float64)).max() <= scale / 2 * (1 + 1e-9)
        assert np.abs(q[row].numpy().astype(int)).max() <= 32767


def test_a_power_of_two_has_no_other_bit_in_the_whole_range() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [2.0**exponent for exponent in exponents.tolist()]


def test_a_largest_number_on_a_power_of_two_fills_the_range() -> None:
    """max|αD|/√r = 32767 · 2⁻²⁰ exactly: the logarithm is whole, and the scale not twice as large."""
    factors = encode(torch.tensor([[32767.0 * 2.0**-20, -1.0 * 2.0**-20, 0.0, 0.0]]) * 2.0)  # √4 = 2
    assert factors.s.tolist() == [2.0**-20]
    assert factors.q.tolist() == [[32767, -1, 0, 0]]


def test_rows_that_are_zero_or_too_small_leave_the_weight_alone() -> None:
    factors = encode(torch.tensor([[0.0, 0.0], [1e-38, 0.0], [1.0, 0.0]]))
    assert factors.s.tolist()[:2] == [2.0**-100, 2.0**-100]
    assert factors.q[:2].abs().sum() == 0
    weight = random_weight((3, 64), torch.float32)
    before = bits(weight)
    apply_(weight, factors, KEY)
    assert np.array_equal(bits(weight)[:2], before[:2])
    assert (bits(weight)[2] != before[2]).all()


def test_what_is_decoded_is_what_was_encoded_to_half_a_scale() -> None:
    change = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 9, 16)).astype(np.float32))
    factors = encode(change)
    assert decode(factors).shape == change.shape
    assert ((decode(factors) - change).abs() <= factors.s[..., None] * 2.0 * (1 + 1e-6)).all()  # ½ · √16


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_displacement_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(AsyncRLError, match="not finite"):
        encode(torch.tensor([[1.0, value]]))


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    weight, factors = torch.ones(4, 8), encode(torch.ones(4, 2))
    wrong = [
        lambda: apply_(weight.double(), factors, KEY),
        lambda: apply_(weight.bfloat16(), factors, KEY),
        lambda: apply_(weight, factors, KEY, rounding=ROUNDING),
        lambda: apply_(weight, Factors(factors.q.int(), factors.s), KEY),
        lambda: apply_(weight, Factors(factors.q[:3], factors.s[:3]), KEY),
        lambda: apply_(weight, Factors(factors.q, factors.s[:3]), KEY),
        lambda: apply_(weight, factors, KEY, start=-1),
        lambda: apply_(weight, factors, KEY, start=8, total_columns=12),
        lambda: encode(torch.ones(4, 513)),
        lambda: encode(torch.ones(4)),
    ]
    for call in wrong:
        with pytest.raises(AsyncRLError, match=r"apply|encode"):
            call()
    assert torch.equal(weight, torch.ones(4, 8))

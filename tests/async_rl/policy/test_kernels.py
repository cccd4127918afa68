"""The exact application as a Triton kernel: the bits of numpy, whatever the shape, the strides and the shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden_updates import ENDS, SENT, Key, after_ten_updates, bits
from interpreted import DEVICE, passes_interpreted, runs_kernels

from async_rl.policy.factors import Factors, apply_numpy, encode
from async_rl.policy.projection import projection_key, signs_numpy
from async_rl.policy.rounding import rounding_key

KEY = projection_key(1, 2, "layer")
ROUNDING = rounding_key(1, 2, "layer")
BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.timeout(600)
def test_interpreted() -> None:
    passes_interpreted("tests/async_rl/policy/test_kernels.py")


def made(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, Factors]:
    """A weight and factors of it, with a row of zeros where there are three (and −0 in the weight there)."""
    generator = np.random.default_rng(0)
    change = generator.normal(size=(*shape[:-1], rank)) * np.exp(3 * generator.normal(size=(*shape[:-1], 1))) * 1e-3
    weight = generator.normal(size=shape) * 0.02
    if shape[-2] >= 3:
        change[..., 1, :] = 0.0
        weight[..., 1, ::2] = -0.0
    return torch.from_numpy(weight.astype(np.float32)).to(dtype), encode(torch.from_numpy(change.astype(np.float32)))


def by_numpy(weight: torch.Tensor, factors: Factors) -> np.ndarray:
    patterns = bits(weight)
    half = weight.dtype == torch.bfloat16
    changed = patterns.view(np.uint16 if half else np.float32)
    apply_numpy(changed, factors.q.numpy(), factors.s.numpy(), KEY, rounding=ROUNDING if half else None)
    return patterns


def by_kernel(weight: torch.Tensor, factors: Factors, start: int = 0, total: int = 0, first_row: int = 0) -> None:
    from async_rl.policy import kernels

    kernels.apply_(
        weight,
        factors.q.to(weight.device),
        factors.s.to(weight.device),
        KEY,
        start=start,
        total_columns=total or weight.shape[-1],
        first_row=first_row,
        rounding=ROUNDING if weight.dtype == torch.bfloat16 else None,
    )


@runs_kernels
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("shape", "rank"), [((1, 1), 1), ((3, 31), 7), ((65, 33), 64), ((3, 257), 33), ((65, 256), 16), ((2, 3, 136), 5)]
)
def test_the_kernel_gives_numpys_bits(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    weight, factors = made(shape, rank, dtype)
    expected = by_numpy(weight, factors)
    by_kernel(on_device := weight.to(DEVICE), factors)
    assert np.array_equal(bits(on_device), expected)


@runs_kernels
@pytest.mark.parametrize(
    ("rank", "start", "stop"),
    [(1, 0, 1), (5, 0, 300), (16, 0, 512), (17, 0, 1025), (33, 127, 130), (3, 511, 1537), (2, 640, 640)],
)
def test_the_kernel_draws_numpys_signs(rank: int, start: int, stop: int) -> None:
    from async_rl.policy import kernels

    drawn = kernels.signs(KEY, rank, start, stop, DEVICE)
    assert drawn.dtype == torch.int8
    assert drawn.is_contiguous()
    assert np.array_equal(drawn.cpu().numpy(), signs_numpy(KEY, rank, start, stop))


@runs_kernels
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("columns", [257, 264])
def test_shards_and_strides_give_the_parts_of_the_whole(columns: int, dtype: torch.dtype) -> None:
    weight, factors = made((65, columns), 16, dtype)
    expected = by_numpy(weight, factors)
    sharded = weight.to(DEVICE, copy=True)
    start = 0
    for part in sharded.chunk(4, dim=1):  # views: their rows are strided
        by_kernel(part, factors, start=start, total=columns)
        start += part.shape[1]
    assert np.array_equal(bits(sharded), expected)

    turned = weight.T.contiguous().T.to(DEVICE)
    first = 0
    for part, q, s in zip(turned.chunk(2), factors.q.chunk(2), factors.s.chunk(2), strict=True):
        by_kernel(part, Factors(q, s), first_row=first)
        first += len(part)
    assert np.array_equal(bits(turned), expected)


@runs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", BOTH)
def test_the_ends_of_every_range_are_kept(dtype: torch.dtype) -> None:
    """The largest q at the largest rank, the smallest and largest scale; weights that are not finite, or nearly not."""
    weight, _ = made((4, 128), 1, dtype)
    values = [float("nan"), float("inf"), -float("inf"), 3.39e38, -3.4e38, -0.0, 1e-40, -1e-45]
    weight[:, :8] = torch.tensor(values).to(dtype)
    sign = torch.ones(4, 512, dtype=torch.int16)
    sign[1::2, ::2] = -1
    factors = Factors(32767 * sign, torch.tensor([2.0**-100, 1.0, 2.0**-20, 2.0**100]))
    expected = by_numpy(weight, factors)
    by_kernel(on_device := weight.to(DEVICE), factors)
    found = bits(on_device)
    number = ~weight.isnan().numpy()  # in float32 one NaN is as good as another
    assert np.array_equal(found[number], expected[number])
    assert on_device.cpu().isnan()[~number].all()


@runs_kernels
@pytest.mark.parametrize("dtype", BOTH)
def test_the_bits_after_ten_updates_are_those_of_everybody(dtype: torch.dtype) -> None:
    def apply(weight: torch.Tensor, factors: Factors, key: Key, rounding: Key | None) -> None:
        from async_rl.policy import kernels

        kernels.apply_(weight, *factors, key, start=0, total_columns=129, first_row=0, rounding=rounding)

    assert after_ten_updates(apply, dtype, DEVICE) == (SENT, ENDS[dtype])

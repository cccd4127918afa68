"""The products of a sketched layer: torch's and Triton's against float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from interpreted import DEVICE, passes_interpreted, runs_kernels

from async_rl.policy.projection import projection_key, signs, signs_numpy
from trainer.kernels import sketching

KEY = projection_key(1, 2, "layer")
CASES = [(1, 1, 1), (3, 31, 7), (65, 33, 16), (70, 257, 33), (130, 129, 130)]
BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.timeout(600)
def test_interpreted() -> None:
    passes_interpreted("tests/trainer/test_sketching_kernels.py")


def made(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)).to(dtype)


def near(found: torch.Tensor, expected: np.ndarray) -> bool:
    """To a rounding of the result's dtype (the interpreter cuts where a GPU rounds), and sums in float32."""
    tolerance = 2.0**-7 if found.dtype == torch.bfloat16 else 2e-6
    return bool(np.abs(found.cpu().double().numpy() - expected).max() <= tolerance * max(1e-9, np.abs(expected).max()))


def projected(x: torch.Tensor, rank: int, start: int = 0) -> np.ndarray:
    sign = signs_numpy(KEY, rank, start, start + x.shape[1]).astype(np.float64)
    return x.double().numpy() @ sign.T


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("tokens", "columns", "rank"), CASES)
def test_torch_projects_and_accumulates(tokens: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    x, g = made(tokens, columns, dtype, 0), made(tokens, 40, dtype, 1)
    p = sketching.project(x, KEY, rank, lambda: signs(KEY, rank, 0, columns))
    assert p.dtype == dtype
    assert near(p, projected(x, rank))
    sketch = made(40, rank, torch.float32, 2)
    expected = sketch.double().numpy() + 0.5 * g.double().numpy().T @ p.double().numpy()
    sketching.accumulate_(sketch, g, p, 0.5)
    assert near(sketch, expected)


@runs_kernels
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("tokens", "columns", "rank"), CASES)
def test_the_kernel_projects(tokens: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    from trainer.kernels import triton_kernels

    x = made(tokens, columns, dtype, 0)
    p = triton_kernels.project(x.to(DEVICE), KEY, rank, 0)
    assert (p.dtype, p.shape) == (dtype, (tokens, rank))
    assert near(p, projected(x, rank))
    turned = x.T.contiguous().to(DEVICE).T
    assert torch.equal(triton_kernels.project(turned, KEY, rank, 0), p)


@runs_kernels
@pytest.mark.parametrize("start", [1, 128, 300])
def test_the_kernel_projects_a_shard_of_columns(start: int) -> None:
    from trainer.kernels import triton_kernels

    x = made(5, 200, torch.float32, 0)
    assert near(triton_kernels.project(x.to(DEVICE), KEY, 9, start), projected(x, 9, start))


@runs_kernels
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("tokens", "rows", "rank"), [(0, 3, 2), *CASES, (1100, 65, 4)])
def test_the_kernel_accumulates(tokens: int, rows: int, rank: int, dtype: torch.dtype) -> None:
    """The last case splits its tokens; rows of the gradient are strided."""
    from trainer.kernels import triton_kernels

    wide = made(tokens, 2 * rows, dtype, 1)
    p, before = made(tokens, rank, dtype, 2), made(rows, rank, torch.float32, 3)
    expected = before.double().numpy() + 0.5 * wide[:, ::2].double().numpy().T @ p.double().numpy()
    sketches = [before.to(DEVICE).clone() for _ in range(2)]
    for sketch in sketches:
        triton_kernels.accumulate_(sketch, wide.to(DEVICE)[:, ::2], p.to(DEVICE), 0.5)
    assert near(sketches[0], expected)
    assert torch.equal(sketches[0], sketches[1])


@runs_kernels
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("counts", "rows", "rank"), [((1,), 1, 1), ((0, 3, 0, 70, 1), 33, 7), ((200, 0), 65, 16)])
def test_the_kernel_accumulates_by_expert(counts: tuple[int, ...], rows: int, rank: int, dtype: torch.dtype) -> None:
    """An expert without tokens keeps its sketch to the bit."""
    from trainer.kernels import triton_kernels

    tokens = sum(counts)
    wide, p = made(tokens, 2 * rows, dtype, 1), made(tokens, rank, dtype, 2)
    before = torch.stack([made(rows, rank, torch.float32, 3 + expert) for expert in range(len(counts))])
    bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sketch = before.to(DEVICE, copy=True)
    triton_kernels.accumulate_groups_(sketch, wide.to(DEVICE)[:, ::2], p.to(DEVICE), bounds.to(DEVICE), 0.5)
    for expert, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
        g, own = wide[first:last, ::2].double().numpy(), p[first:last].double().numpy()
        assert near(sketch[expert], before[expert].double().numpy() + 0.5 * g.T @ own)
        if first == last:
            assert torch.equal(sketch[expert].cpu(), before[expert])


@runs_kernels
def test_no_rows_and_no_columns_give_nothing() -> None:
    from trainer.kernels import triton_kernels

    assert triton_kernels.project(torch.empty(0, 7, device=DEVICE), KEY, 3, 0).shape == (0, 3)
    assert triton_kernels.project(torch.empty(2, 0, device=DEVICE), KEY, 3, 0).tolist() == [[0.0] * 3] * 2

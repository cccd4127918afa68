"""The two products of a sketched layer, by Triton's kernels on a GPU, and in torch elsewhere.

Neither scales by 1/√rank where it would be rounded: `project` gives x·signᵀ = √rank · x Aᵀ, and `accumulate_` takes the
factor, in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from async_rl.policy.factors import whole_float32
from async_rl.policy.grouped import parts, takes_grouped
from async_rl.policy.projection import ProjectionKey, triton_runs_on


def project(
    x: torch.Tensor, key: ProjectionKey, rank: int, drawn: Callable[[], torch.Tensor], *, start: int = 0
) -> torch.Tensor:
    """x·signᵀ: [tokens, rank] in x's dtype, summed in float32, of x [tokens, columns] (float32 or bfloat16, any
    strides), whose columns are the global ones from `start` on. Where no kernel draws the signs itself they are those
    that `drawn` returns: int8 [rank, columns]."""
    if triton_runs_on(x.device):
        from trainer.kernels import triton_kernels

        return triton_kernels.project(x, key, rank, start)
    return x @ drawn().to(x.dtype).T


def accumulate_(sketch: torch.Tensor, gradient: torch.Tensor, projected: torch.Tensor, scale: float = 1.0) -> None:
    """sketch += scale · gradientᵀ · projected in float32, in place: sketch float32 [rows, rank], gradient [tokens,
    rows] (any strides) and projected [tokens, rank] of one dtype. The same bits every time."""
    if triton_runs_on(sketch.device) and sketch.is_contiguous():
        from trainer.kernels import triton_kernels

        triton_kernels.accumulate_(sketch, gradient, projected, scale)
        return
    with whole_float32():
        sketch.addmm_(gradient.to(sketch.dtype).T, projected.to(sketch.dtype), alpha=scale)


def accumulate_groups_(
    sketch: torch.Tensor, gradient: torch.Tensor, projected: torch.Tensor, bounds: torch.Tensor, scale: float = 1.0
) -> None:
    """`accumulate_` of each expert's own tokens into its own sketch: sketch float32 [experts, rows, rank], and tokens
    sorted by expert (see `grouped`). One product for all experts where there is one."""
    if triton_runs_on(sketch.device) and sketch.is_contiguous():
        from trainer.kernels import triton_kernels

        triton_kernels.accumulate_groups_(sketch, gradient, projected, bounds, scale)
        return
    gradient, projected = gradient.to(sketch.dtype).contiguous(), projected.to(sketch.dtype).contiguous()
    with whole_float32():
        if takes_grouped(gradient, projected):
            sketch.add_(nn.functional.grouped_mm(gradient.T, projected, offs=bounds[1:]), alpha=scale)
            return
        for own, g, p in zip(sketch, parts(gradient, bounds), parts(projected, bounds), strict=True):
            if len(g):
                own.addmm_(g.T, p, alpha=scale)

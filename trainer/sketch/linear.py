"""A linear layer that keeps what its sketch needs, P = x·Aᵀ, and not its input; no gradient of the weight ever exists.

Forward: y = x Wᵀ + b, with P [n, rank] kept for the backward pass in place of x [n, columns]. Backward: ∂x = g W, and
S += gᵀ P = (gᵀ x) Aᵀ, exactly the gradient's sketch. P is a saved tensor as autograd's own are: activation
checkpointing drops it and computes it again, and S is added to once, in the backward pass alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.sketch.blocks import Accumulator


def attach_linear(layer: nn.Linear, accumulator: Accumulator, anchor: torch.Tensor) -> None:
    """Let `layer` sketch its gradient wherever gradients are wanted; elsewhere (no_grad) it computes as it did.

    All weights are frozen, so autograd would see nothing to learn: `anchor`, a scalar that requires a gradient and gets
    none, is an input to every sketched layer. So the embeddings' output need not pose as a parameter, and what lies
    before the first sketched layer is not differentiated."""
    layer.forward = partial(_forward, layer, accumulator, anchor)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, accumulator: Accumulator, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return nn.functional.linear(x, layer.weight, layer.bias)
    out: torch.Tensor = _SketchedLinear.apply(x, layer.weight, layer.bias, anchor, accumulator)
    return out


class _SketchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor,
        accumulator: Accumulator,
    ) -> torch.Tensor:
        ctx.accumulator = accumulator
        ctx.save_for_backward(accumulator.project(x.reshape(-1, x.shape[-1])), weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        projected, weight = ctx.saved_tensors
        ctx.accumulator.add(gradient.reshape(-1, gradient.shape[-1]), projected)
        below = gradient @ weight if ctx.needs_input_grad[0] else None
        return below, None, None, None, None

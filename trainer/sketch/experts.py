"""Fused experts (3-D weights, transformers 5), sketched inside the grouped product.

All experts of a layer share the projection A of a row block, so P = x Aᵀ is one product over all tokens; each has a
sketch of its own, S_e = g_eᵀ P_e, one more grouped product. gate_up_proj is two row blocks with two projections, as in
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from async_rl.errors import AsyncRLError
from async_rl.policy.experts import (
    PROJECTIONS,
    Product,
    expert_weights,
    forward_by_projection,
    odd_layout,
    plain_products,
    put_projections,
)
from trainer.sketch.blocks import Accumulator, Block


def expert_blocks(path: str, experts: nn.Module, ranks: Mapping[str, int], rank: int) -> list[Block]:
    """Gate, up and down. Raises AsyncRLError for a layout that is not gate and up one behind the other, [experts, out,
    in], without bias."""
    if odd := odd_layout(experts):
        raise AsyncRLError(
            f'[trainer] kind = "sketch": the experts {path} ({type(experts).__name__}) are stored in a layout that '
            f"sketches do not know ({odd}): use a model whose experts are "
            'gate_up_proj and down_proj, [experts, out, in], or kind = "lora"'
        )
    return [
        Block(f"{path}.{name}", f"{path}.{PROJECTIONS}.{name}", weight, ranks.get(name, rank))
        for name, weight in expert_weights(experts).items()
    ]


def attach_experts(experts: nn.Module, accumulators: Mapping[str, Accumulator], anchor: torch.Tensor) -> None:
    """Let `experts` sketch the gradients of those of gate_proj, up_proj and down_proj that have an accumulator,
    wherever gradients are wanted; elsewhere (no_grad) they compute as they did. Only as "eager" experts, which step
    control asks for, are they computed projection by projection there too. `anchor`: see `attach_linear`."""
    parts = {
        name: ExpertProjection(weight, accumulators.get(name), anchor)
        for name, weight in expert_weights(experts).items()
    }
    put_projections(experts, parts, partial(_forward, experts, experts.forward))


def _forward(experts: Any, plain: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    if not plain_products(experts) and not torch.is_grad_enabled():
        return plain(*inputs)
    return forward_by_projection(experts, *inputs)


class ExpertProjection(nn.Module):
    """One projection of all experts of a layer: a module without parameters, so that what looks at layers' inputs and
    outputs finds one here too. `weight` is a view, [experts, out, in]."""

    def __init__(self, weight: torch.Tensor, accumulator: Accumulator | None, anchor: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self._accumulator = accumulator
        self._anchor = anchor

    def forward(self, x: torch.Tensor, bounds: torch.Tensor, product: Product) -> torch.Tensor:
        """[n, out] of x [n, in], whose rows are sorted by expert: see `async_rl.policy.grouped`."""
        if not torch.is_grad_enabled():
            return product(x, self.weight.transpose(1, 2), bounds)
        out: torch.Tensor = _SketchedExperts.apply(x, self.weight, bounds, product, self._accumulator, self._anchor)
        return out


class _SketchedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bounds: torch.Tensor,
        product: Product,
        accumulator: Accumulator | None,
        anchor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.product, ctx.accumulator = product, accumulator
        ctx.save_for_backward(weight, bounds, *(() if accumulator is None else (accumulator.project(x),)))
        return product(x, weight.transpose(1, 2), bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        weight, bounds, *projected = ctx.saved_tensors
        for values in projected:
            ctx.accumulator.add(gradient, values, bounds)
        below = ctx.product(gradient, weight, bounds) if ctx.needs_input_grad[0] else None
        return below, None, None, None, None, None

"""Fused experts (3-D weights, transformers 5), sketched inside the grouped product.

Tokens are sorted by the expert they go to, and each expert multiplies its own stretch, in one grouped product. All
experts of a layer share the projection A of a row block, so P = x Aᵀ is one product over all stretches; each has a
sketch of its own, S_e = g_eᵀ P_e, grouped again. gate_up_proj is two row blocks with two projections, as in the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from async_rl.errors import AsyncRLError
from trainer.kernels.grouped import expert_products, separate_products, sorted_bounds
from trainer.sketch.blocks import Accumulator, Block

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"  # as in the checkpoint
GATE_UP = "gate_up_proj"
PROJECTIONS = "projections"  # below an experts module

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold an expert weight as one 3-D parameter, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if "expert" in path and any(each.dim() == 3 for each in module.parameters(recurse=False))
    }


def expert_blocks(path: str, experts: nn.Module, ranks: Mapping[str, int], rank: int) -> list[Block]:
    """Gate, up and down. Raises AsyncRLError for a layout that is not gate and up one behind the other, [experts, out,
    in], without bias."""
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    odd = [name for name, value in plain.items() if getattr(experts, name, None) is not value]
    if odd or getattr(experts, "has_post_expert_norm", True) or {*dict(experts.named_parameters())} != {GATE_UP, DOWN}:
        raise AsyncRLError(
            f'[trainer] kind = "sketch": the experts {path} ({type(experts).__name__}) are stored in a layout that '
            f"sketches do not know ({', '.join(odd) or 'other parameters'}): use a model whose experts are "
            'gate_up_proj and down_proj, [experts, out, in], or kind = "lora"'
        )
    fused, down = (experts.get_parameter(name).detach() for name in (GATE_UP, DOWN))
    gate, up = fused.chunk(2, dim=1)
    named = {GATE: gate, UP: up, DOWN: down}
    return [
        Block(f"{path}.{name}", f"{path}.{PROJECTIONS}.{name}", weight, ranks.get(name, rank))
        for name, weight in named.items()
    ]


def attach_experts(experts: nn.Module, accumulators: Mapping[str, Accumulator], anchor: torch.Tensor) -> None:
    """Let `experts` sketch the gradients of those of gate_proj, up_proj and down_proj that have an accumulator,
    wherever gradients are wanted; elsewhere (no_grad) they compute as they did. Only as "eager" experts, which step
    control asks for, are they computed projection by projection there too. `anchor`: see `attach_linear`."""
    fused, down = (experts.get_parameter(name).detach() for name in (GATE_UP, DOWN))
    weights = dict(zip((GATE, UP, DOWN), (*fused.chunk(2, dim=1), down), strict=True))
    parts = {name: ExpertProjection(weight, accumulators.get(name), anchor) for name, weight in weights.items()}
    experts.add_module(PROJECTIONS, nn.ModuleDict(parts))
    experts.forward = partial(_forward, experts, experts.forward)  # type: ignore[method-assign]


def _forward(
    experts: Any,
    plain: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' contract of an experts module: hidden [tokens, width], chosen int64 and weights [tokens, k]."""
    eager = experts.config._experts_implementation == "eager"
    if not eager and not torch.is_grad_enabled():
        return plain(hidden, chosen, weights)
    k = chosen.shape[-1]
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    bounds = sorted_bounds(expert, experts.num_experts)
    product = separate_products if eager else expert_products
    x, parts = hidden[order // k], experts.projections
    inside = experts._apply_gate(torch.cat([parts[GATE](x, bounds, product), parts[UP](x, bounds, product)], dim=-1))
    out = parts[DOWN](inside, bounds, product) * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    total: torch.Tensor = out[back].view(*chosen.shape, -1).sum(dim=1)
    return total.to(hidden.dtype)


class ExpertProjection(nn.Module):
    """One projection of all experts of a layer: a module without parameters, so that what looks at layers' inputs and
    outputs finds one here too. `weight` is a view, [experts, out, in]."""

    def __init__(self, weight: torch.Tensor, accumulator: Accumulator | None, anchor: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self._accumulator = accumulator
        self._anchor = anchor

    def forward(self, x: torch.Tensor, bounds: torch.Tensor, product: Product) -> torch.Tensor:
        """[n, out] of x [n, in], whose rows are sorted by expert: see `trainer.kernels.grouped`."""
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

"""Fused experts (transformers 5: one 3-D parameter for all experts of a layer), computed projection by projection, so
that something can be put on each: an adapter, a sketch, the weights of several policies.

Tokens are sorted by the expert they go to, and each expert multiplies its own stretch, in one grouped product
(async_rl.policy.grouped). The projections are those of the checkpoint: gate_up_proj in memory is gate_proj and up_proj,
one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from async_rl.policy.grouped import expert_products, separate_products, sorted_bounds
from async_rl.trainer_config import ExpertAdapters

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


def odd_layout(experts: nn.Module) -> str:
    """What is unknown here about how experts are stored; empty when gate and up lie one behind the other, [experts,
    out, in], without bias."""
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    odd = [name for name, value in plain.items() if getattr(experts, name, None) is not value]
    if odd or getattr(experts, "has_post_expert_norm", True) or {*dict(experts.named_parameters())} != {GATE_UP, DOWN}:
        return ", ".join(odd) or "other parameters"
    return ""


def expert_weights(experts: nn.Module) -> dict[str, torch.Tensor]:
    """gate_proj, up_proj and down_proj of experts of the known layout: views, [experts, out, in]."""
    fused, down = (experts.get_parameter(name).detach() for name in (GATE_UP, DOWN))
    return dict(zip((GATE, UP, DOWN), (*fused.chunk(2, dim=1), down), strict=True))


class ExpertTarget(NamedTuple):
    """A projection of all experts of a layer to adapt: path of the experts module, gate_proj, up_proj or down_proj, and
    each expert's shape."""

    path: str
    projection: str
    experts: int
    out_features: int
    in_features: int

    @property
    def name(self) -> str:
        """Of what all experts share."""
        return f"{self.path}.{self.projection}"

    def module(self, expert: int) -> str:
        """As the checkpoint has it, each expert a module of its own."""
        return f"{self.path}.{expert}.{self.projection}"

    def modules(self) -> list[str]:
        return [self.module(expert) for expert in range(self.experts)]

    def parameters(self, rank: int, layout: ExpertAdapters) -> int:
        """Trainable ones. Of a shared-outer adapter all experts share A before the hidden width, and B behind it."""
        outer, inner = rank * self.in_features, rank * self.out_features
        if self.projection == DOWN:
            outer, inner = inner, outer
        return inner * self.experts + outer * (self.experts if layout == "each" else 1)


def find_experts(model: nn.Module) -> tuple[list[ExpertTarget], dict[str, str]]:
    """All projections of experts, and by path what is unknown about those that are stored in another layout."""
    found, unknown = [], {}
    for path, module in expert_modules(model).items():
        if odd := odd_layout(module):
            unknown[path] = f"{type(module).__name__}: {odd}"
            continue
        for projection, weight in expert_weights(module).items():
            found.append(ExpertTarget(path, projection, *weight.shape))
    return found, unknown


def put_projections(experts: nn.Module, parts: Mapping[str, nn.Module], forward: Callable[..., torch.Tensor]) -> None:
    """Let `experts` compute by `forward`, and `parts`, one for each of the three, be its modules. A part is called with
    x [n, in], whose rows are sorted by expert, their bounds (async_rl.policy.grouped), and the product to use."""
    experts.add_module(PROJECTIONS, nn.ModuleDict(parts))
    experts.forward = forward


def plain_products(experts: Any) -> bool:
    """Whether experts are to be computed one after the other, by operators that have a forward mode: step control asks
    for it as transformers' "eager" implementation."""
    return bool(experts.config._experts_implementation == "eager")


def forward_by_projection(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """transformers' contract of an experts module: hidden [tokens, width], chosen int64 and weights [tokens, k]."""
    k = chosen.shape[-1]
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    bounds = sorted_bounds(expert, experts.num_experts)
    product = separate_products if plain_products(experts) else expert_products
    x, parts = hidden[order // k], experts.projections
    inside = experts._apply_gate(torch.cat([parts[GATE](x, bounds, product), parts[UP](x, bounds, product)], dim=-1))
    out = parts[DOWN](inside, bounds, product) * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    total: torch.Tensor = out[back].view(*chosen.shape, -1).sum(dim=1)
    return total.to(hidden.dtype)

"""Fused experts that hold the adapters of several resident policies at once, as linear layers do in
inference.slot_linear.

In float32 a slot that has an adapter holds merged weights W + scale·B·A of all experts. In bfloat16 or float16 it holds
A and B of each, and the low-rank path is computed beside the grouped product, in the precision they were sent in.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from async_rl.policy.experts import (
    ExpertTarget,
    Product,
    expert_weights,
    find_experts,
    forward_by_projection,
    put_projections,
)
from inference.slot_linear import ActiveSlot, LowRank


class SlotExperts(nn.Module):
    """One projection of all experts of a layer. `weight` is a view of the model's own, [experts, out, in]; adapters
    have the experts' number in front: a [experts, r, in], b [experts, out, r]."""

    def __init__(self, weight: torch.Tensor, target: ExpertTarget, active: ActiveSlot, slots: int) -> None:
        super().__init__()
        self.weight, self.target, self.active = weight, target, active
        self.merges = weight.dtype == torch.float32
        self.slot_weights = [weight] * slots
        self.slot_adapters: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * slots

    def load(self, slot: int, adapter: LowRank | None) -> None:
        """Fill a slot; None means that the policy leaves these experts as they are."""
        if adapter is None:
            self.slot_weights[slot], self.slot_adapters[slot] = self.weight, None
            return
        a, b = (part.to(self.weight.device) for part in (adapter.a, adapter.b))
        if not self.merges:
            self.slot_adapters[slot] = (a, b * adapter.scale)
            return
        if self.slot_weights[slot] is self.weight:
            self.slot_weights[slot] = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
        a, b = a.to(self.weight.dtype), b.to(self.weight.dtype)
        torch.baddbmm(self.weight, b, a, alpha=adapter.scale, out=self.slot_weights[slot])

    def forward(self, x: torch.Tensor, bounds: torch.Tensor, product: Product) -> torch.Tensor:
        """[n, out] of x [n, in], whose rows are sorted by expert: see `async_rl.policy.experts.put_projections`."""
        slot = self.active.index
        y = product(x, self.slot_weights[slot].transpose(1, 2), bounds)
        if (adapter := self.slot_adapters[slot]) is None:
            return y
        a, b = adapter
        inner = product(x.to(a.dtype), a.transpose(1, 2), bounds)
        return (y + product(inner, b.transpose(1, 2), bounds)).to(y.dtype)


def wrap_experts(model: nn.Module, active: ActiveSlot, slots: int) -> dict[str, SlotExperts]:
    """Let all experts of a known layout compute with the slot that `active` names; their projections, by path. Experts
    of another layout stay as they are: no adapter matches them."""
    wrapped: dict[str, SlotExperts] = {}
    parts: dict[str, dict[str, nn.Module]] = {}
    for target in find_experts(model)[0]:
        weight = expert_weights(model.get_submodule(target.path))[target.projection]
        made = SlotExperts(weight, target, active, slots)
        parts.setdefault(target.path, {})[target.projection] = wrapped[target.name] = made
    for path, own in parts.items():
        experts = model.get_submodule(path)
        put_projections(experts, own, partial(forward_by_projection, experts))
    return wrapped

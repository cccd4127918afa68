"""Linear layers that hold the adapters of several resident policies at once.

All layers of a model share one `ActiveSlot`; setting its index switches the whole model to another policy without
copying anything. In float32 a slot holds the merged weight W + scale·B·A, so a step costs what the plain model costs.
In bfloat16 or float16 merging would round most of the update away, so a slot holds A and B, and the layer computes
W·x + scale·B·(A·x) with the adapter in the precision it was sent in (as peft does).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D


class ActiveSlot:
    """The slot that every layer of one model computes with."""

    def __init__(self) -> None:
        self.index = 0


class LowRank(NamedTuple):
    """One module's adapter: a [r, in], b [out, r]; the update of the weight is scale · b @ a."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class SlotLinear(nn.Linear):
    """Common part: the base weight and bias are those of the layer that this one replaces, shared, not copied."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, active: ActiveSlot, slots: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.bias = bias
        self.active = active
        self.slots = slots

    def load(self, slot: int, adapter: LowRank | None) -> None:
        """Fill a slot; None means that the policy leaves this layer as it is."""
        raise NotImplementedError


class MergedLinear(SlotLinear):
    """float32: one weight per slot. An untouched layer's slot is the base weight itself."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, active: ActiveSlot, slots: int) -> None:
        super().__init__(weight, bias, active, slots)
        self.slot_weights: list[torch.Tensor] = [weight.detach()] * slots

    def load(self, slot: int, adapter: LowRank | None) -> None:
        base = self.weight.detach()
        if adapter is None:
            self.slot_weights[slot] = base
            return
        if self.slot_weights[slot].data_ptr() == base.data_ptr():
            self.slot_weights[slot] = torch.empty_like(base)
        a, b = adapter.a.to(base.device, base.dtype), adapter.b.to(base.device, base.dtype)
        torch.addmm(base, b, a, alpha=adapter.scale, out=self.slot_weights[slot])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.slot_weights[self.active.index], self.bias)


class UnmergedLinear(SlotLinear):
    """bfloat16, float16: base layer and low-rank path apart."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, active: ActiveSlot, slots: int) -> None:
        super().__init__(weight, bias, active, slots)
        self.slot_adapters: list[LowRank | None] = [None] * slots

    def load(self, slot: int, adapter: LowRank | None) -> None:
        device = self.weight.device
        self.slot_adapters[slot] = adapter and LowRank(adapter.a.to(device), adapter.b.to(device), adapter.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        adapter = self.slot_adapters[self.active.index]
        if adapter is None:
            return y
        update = linear(linear(x.to(adapter.a.dtype), adapter.a), adapter.b)
        return (y + adapter.scale * update).to(y.dtype)


def wrap_linears(model: nn.Module, active: ActiveSlot, slots: int) -> dict[str, SlotLinear]:
    """Replace every linear module (GPT-2's Conv1D included, its weight transposed) and return them by name."""
    wrapped: dict[str, SlotLinear] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            weight = module.weight
        elif isinstance(module, Conv1D):
            weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
        else:
            continue
        kind = MergedLinear if weight.dtype == torch.float32 else UnmergedLinear
        wrapped[name] = kind(weight, module.bias, active, slots)
        model.set_submodule(name, wrapped[name])
    return wrapped

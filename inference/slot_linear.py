"""Linear layers that hold the adapters of several resident policies at once.

All layers of a model share one `ActiveSlot`; setting its index switches the whole model to another policy without
copying anything. In float32 a slot holds the merged weight W + scale·B·A, so a step costs what the plain model costs.
In bfloat16 or float16 merging would round most of the update away, so a slot holds A and B, and the layer computes
W·x + scale·B·(A·x) with the adapter in the precision it was sent in (as peft does).

Merged layers that are fed the same input may be joined: their weights then lie below one another in one matrix per
slot, so that one product computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class SlotTensors(NamedTuple):
    """A layer under one policy: weight [out, in], bias [out]; a [r, in] and b [out, r], in a precision of their own,
    where the adapter is kept apart."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None


def low_rank_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None
) -> torch.Tensor:
    """x Wᵀ + bias + (x aᵀ) bᵀ: x [..., in], the others as in SlotTensors; returns [..., out]."""
    y = linear(x, weight, bias)
    if a is None or b is None:
        return y
    return (y + linear(linear(x.to(a.dtype), a), b)).to(y.dtype)


class SlotLinear(nn.Linear):
    """Common part: the base weight and bias are those of the layer that this one replaces, shared, not copied; but the
    weight of one that had it `transposed`."""

    transposed = False

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, active: ActiveSlot, slots: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.bias = bias
        self.active = active
        self.slots = slots

    def load(self, slot: int, adapter: LowRank | None) -> None:
        """Fill a slot; None means that the policy leaves this layer as it is."""
        raise NotImplementedError

    def in_slot(self, slot: int) -> SlotTensors:
        """What `low_rank_linear` needs to compute this layer under the policy in a slot."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return low_rank_linear(x, *self.in_slot(self.active.index))


class JointWeights:
    """One matrix [sum of outputs, in] per slot, of merged layers with the same input. A slot that no adapter ever
    touched is the base matrix itself."""

    def __init__(self, layers: Sequence[MergedLinear]) -> None:
        base = layers[0].weight.detach()
        if len(layers) > 1:
            base = torch.cat([layer.weight.detach() for layer in layers])
        self.matrices = [base] * layers[0].slots
        self._layers, self._base = layers, base
        self._outputs = [layer.out_features for layer in layers]
        for layer, part in zip(layers, base.split(self._outputs), strict=True):
            layer.joint = self
            layer.weight.data = part  # so that the base lies in memory once
            layer.slot_weights = [part] * layer.slots

    def own(self, slot: int) -> None:
        """See to it that the slot can be written to."""
        if self.matrices[slot] is self._base:
            self.matrices[slot] = self._base.clone()
            for layer, part in zip(self._layers, self.matrices[slot].split(self._outputs), strict=True):
                layer.slot_weights[slot] = part


class MergedLinear(SlotLinear):
    """float32: one weight per slot."""

    joint: JointWeights
    slot_weights: list[torch.Tensor]

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, active: ActiveSlot, slots: int) -> None:
        super().__init__(weight, bias, active, slots)
        JointWeights([self])

    def load(self, slot: int, adapter: LowRank | None) -> None:
        base = self.weight.detach()
        if adapter is None and self.slot_weights[slot].data_ptr() == base.data_ptr():
            return
        self.joint.own(slot)
        if adapter is None:
            self.slot_weights[slot].copy_(base)
            return
        a, b = adapter.a.to(base.device, base.dtype), adapter.b.to(base.device, base.dtype)
        torch.addmm(base, b, a, alpha=adapter.scale, out=self.slot_weights[slot])

    def in_slot(self, slot: int) -> SlotTensors:
        return SlotTensors(self.slot_weights[slot], self.bias, None, None)


class UnmergedLinear(SlotLinear):
    """bfloat16, float16: base layer and low-rank path apart. A slot holds a and scale · b."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, active: ActiveSlot, slots: int) -> None:
        super().__init__(weight, bias, active, slots)
        self.slot_adapters: list[tuple[torch.Tensor, torch.Tensor] | tuple[None, None]] = [(None, None)] * slots

    def load(self, slot: int, adapter: LowRank | None) -> None:
        device = self.weight.device
        self.slot_adapters[slot] = (
            (None, None) if adapter is None else (adapter.a.to(device), adapter.b.to(device) * adapter.scale)
        )

    def in_slot(self, slot: int) -> SlotTensors:
        return SlotTensors(self.weight, self.bias, *self.slot_adapters[slot])


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
        wrapped[name].transposed = isinstance(module, Conv1D)
        model.set_submodule(name, wrapped[name])
    return wrapped

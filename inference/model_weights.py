"""The weights of a model under the names that policy files use, as views: writing to one changes the model.

A parameter has the name and shape that it has in transformers, tied ones once. A projection is what a factor update
moves: the weight of one linear layer as [out, in], or of all experts of a layer as [expert, out, in], named after the
module path without ".weight". A parameter that holds two projections below one another has two such views.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from inference.slot_linear import SlotLinear

FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ModelWeights(NamedTuple):
    parameters: dict[str, torch.Tensor]
    projections: dict[str, torch.Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parameters, sorted: the set that a policy determines."""
        return tuple(sorted(self.parameters))


def model_weights(model: nn.Module) -> ModelWeights:
    """Of a model as transformers loads it, or with its linear layers replaced (inference.slot_linear)."""
    modules = dict(model.named_modules())
    parameters = {}
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        flipped = isinstance(owner, SlotLinear) and owner.transposed and name.endswith(".weight")
        parameters[name] = parameter.detach().t() if flipped else parameter.detach()
    return ModelWeights(parameters, dict(_projections(modules)))


def _projections(modules: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in modules.items():
        if isinstance(module, nn.Linear):  # which a SlotLinear is, its weight the right way round
            yield name, module.weight.detach()
        elif isinstance(module, Conv1D):
            yield name, module.weight.detach().t()
        elif not getattr(module, "is_transposed", False):  # those have [expert, in, out]
            for fused, parts in FUSED_EXPERTS.items():
                weight = getattr(module, fused, None)
                if isinstance(weight, nn.Parameter) and weight.dim() == 3 and weight.shape[1] % len(parts) == 0:
                    blocks = weight.detach().chunk(len(parts), dim=1)
                    yield from ((f"{name}.{part}", block) for part, block in zip(parts, blocks, strict=True))

"""Models after a step, made the plain way: weights are copied and changed, and whole distributions compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.learnable import LowRank, Proposal


def scaled(proposal: Proposal, by: float) -> Proposal:
    return Proposal(
        {name: [LowRank(pair.a, by * pair.b) for pair in pairs] for name, pairs in proposal.tangents.items()},
        {name: by * change for name, change in proposal.dense.items()},
    )


def moved(model: Any, proposal: Proposal) -> Any:
    """Another model, after the step."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, pairs in proposal.tangents.items():
            weight = weight_of(other, name)
            for pair in pairs:
                weight += (pair.b.double() @ pair.a.double()).to(weight)
        for name, change in proposal.dense.items():
            other.get_parameter(name).add_(change)
    return other


def weight_of(model: Any, name: str) -> torch.Tensor:
    """[out, in] of a linear layer, [experts, out, in] of a projection of fused experts."""
    layer = model.get_submodule(name)
    weight: torch.Tensor = getattr(layer, "base_layer", layer).weight.data
    return weight


def in_float64(model: Any) -> Any:
    """The model itself, and what its fused experts' projections look at; experts one by one, because torch's grouped
    product is not made for it."""
    model.to(torch.float64)
    if getattr(model.config, "_experts_implementation", None):
        model.set_experts_implementation("eager")
    for module in model.modules():
        for name, projection in getattr(module, "projections", {}).items():
            fused = module.gate_up_proj.data.chunk(2, dim=1)
            projection.weight = module.down_proj.data if name == "down_proj" else fused[name == "up_proj"]
    return model


def logits_of(
    model: Any, tokens: Sequence[npt.NDArray[np.int32]], places: Sequence[npt.NDArray[np.intp]]
) -> torch.Tensor:
    """Before the places that are looked at, by the plain model and one sequence at a time: float64 [n, vocabulary]."""
    with torch.no_grad():
        rows = [
            model(input_ids=torch.from_numpy(each.astype(np.int64))[None]).logits[0, where - 1]
            for each, where in zip(tokens, places, strict=True)
        ]
    return torch.cat(rows).double()


def divergence_of(before: torch.Tensor, after: torch.Tensor, temperature: float) -> float:
    """Mean KL of two policies' logits."""
    p, q = (torch.log_softmax(logits / temperature, -1) for logits in (before, after))
    return float((p.exp() * (p - q)).sum(-1).mean())

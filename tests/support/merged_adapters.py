"""An adapter's effect the plain way: whole weights W + s B A of a Hugging Face model, by the names of the adapter file.

Nothing of the house's own layers is used, so it is what these are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call

PREFIX = "base_model.model."
EXPERT = re.compile(r"(?P<path>.*\.experts)\.(?:(?P<expert>\d+)\.)?(?P<projection>gate_proj|up_proj|down_proj)")


def merged_weights(model: Any, tensors: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The parameters of `model` that the adapter changes, as they are with it; differentiable by its tensors."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    changed: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for name, b in tensors.items():
        module = name.removeprefix(PREFIX).removesuffix(".lora_B.weight")
        if not name.endswith(".lora_B.weight") or EXPERT.fullmatch(module):
            continue
        a = tensors[f"{PREFIX}{module}.lora_A.weight"]
        changed[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (b @ a)
    for name, tensor in tensors.items():
        module, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if found := EXPERT.fullmatch(module):
            key = f"{part}{found['expert'] or ''}"
            experts.setdefault((found["path"], found["projection"]), {})[key] = tensor
    for path in sorted({path for path, _ in experts}):
        count = len(weights[f"{path}.down_proj"])
        deltas = {
            projection: torch.stack(
                [own.get(f"B{e}", own.get("B")) @ own.get(f"A{e}", own.get("A")) for e in range(count)]  # type: ignore[operator]
            )
            for (where, projection), own in experts.items()
            if where == path
        }
        if "down_proj" in deltas:
            changed[f"{path}.down_proj"] = weights[f"{path}.down_proj"] + scale * deltas["down_proj"]
        gate, up = weights[f"{path}.gate_up_proj"].chunk(2, dim=1)
        if "gate_proj" in deltas:
            gate = gate + scale * deltas["gate_proj"]
        if "up_proj" in deltas:
            up = up + scale * deltas["up_proj"]
        changed[f"{path}.gate_up_proj"] = torch.cat([gate, up], dim=1)
    return changed


def merged_logits(model: Any, tensors: Mapping[str, torch.Tensor], scale: float, ids: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, vocabulary] of ids [rows, tokens]."""
    logits: torch.Tensor = functional_call(
        model, merged_weights(model, tensors, scale), (ids,), {"use_cache": False}
    ).logits
    return logits

"""Matching an adapter's tensors with a model's linear modules: everything or nothing.

A policy that is served with one target missing or misnamed is a different policy from the one that was trained, and
nothing downstream would notice. So every tensor must find its module, every module that the config targets must
find its A and its B, and every shape must be right, before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from async_rl.policy.adapter import TENSOR_PREFIX
from inference.engine import EngineError
from inference.slot_linear import LowRank

A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"


def lora_scale(config: Mapping[str, Any]) -> float:
    """alpha/r, or alpha/sqrt(r) with rank-stabilised LoRA (arXiv:2312.03732)."""
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def match_adapter(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, LowRank]:
    """The adapter per module name. `shapes` gives [out, in] of each linear module of the model. Raises EngineError
    naming the first tensor, module or target that does not fit."""
    rank, scale = int(config["r"]), lora_scale(config)
    targets = targeted_modules(config["target_modules"], shapes)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, part = split_tensor_name(name)
        if module not in shapes:
            raise EngineError(f"adapter tensor {name!r} matches no linear module of the model")
        if module not in targets:
            raise EngineError(f"adapter tensor {name!r}: {module} is not among the config's target_modules")
        out_features, in_features = shapes[module]
        expected = (rank, in_features) if part == "A" else (out_features, rank)
        if tuple(tensor.shape) != expected:
            raise EngineError(f"adapter tensor {name!r} has shape {tuple(tensor.shape)}, the module needs {expected}")
        # The two extremes show every NaN and infinity, in a fifth of the time of a mask (measured).
        if not tensor.is_floating_point() or not all(map(math.isfinite, torch.stack(torch.aminmax(tensor)).tolist())):
            raise EngineError(f"adapter tensor {name!r} ({tensor.dtype}) holds what is not a finite float")
        found.setdefault(module, {})[part] = tensor
    for module in targets:
        missing = {"A", "B"} - found.get(module, {}).keys()
        if missing:
            raise EngineError(f"adapter is incomplete: target {module} has no lora_{min(missing)}")
    return {module: LowRank(found[module]["A"], found[module]["B"], scale) for module in targets}


def split_tensor_name(name: str) -> tuple[str, str]:
    """`base_model.model.<module>.lora_A.weight` -> (module, "A")."""
    for suffix, part in ((A_SUFFIX, "A"), (B_SUFFIX, "B")):
        if name.startswith(TENSOR_PREFIX) and name.endswith(suffix):
            return name[len(TENSOR_PREFIX) : -len(suffix)], part
    raise EngineError(f"adapter tensor {name!r} is not named {TENSOR_PREFIX}<module>{A_SUFFIX} or …{B_SUFFIX}")


def targeted_modules(targets: Sequence[str], modules: Mapping[str, Any]) -> list[str]:
    """Module names that PEFT's target list means (a full name, or the end of one after a dot), sorted."""
    matched = set()
    for target in targets:
        hits = [name for name in modules if name == target or name.endswith("." + target)]
        if not hits:
            raise EngineError(f"adapter target {target!r} matches no linear module of the model")
        matched.update(hits)
    return sorted(matched)

"""Matching an adapter's tensors with a model's linear modules and experts: everything or nothing.

A policy that is served with one target missing or misnamed is a different policy from the one that was trained, and
nothing downstream would notice. So every tensor must find its module, every module that the config targets must
find its A and its B, and every shape must be right, before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from async_rl.policy.adapter import AdapterError, lora_scale, means, split_tensor_name
from async_rl.policy.experts import ExpertTarget
from inference.engine import EngineError
from inference.slot_linear import LowRank

A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"


def match_adapter(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int]],
    experts: Sequence[ExpertTarget] = (),
) -> dict[str, LowRank]:
    """The adapter per module name, and per projection of `experts` (then a [experts, r, in] and b [experts, out, r]).
    `shapes` gives [out, in] of each linear module of the model. Each expert is a module of its own in an adapter, and
    what all of a projection share bears the projection's name. Raises EngineError naming the first tensor, module or
    target that does not fit."""
    rank, scale = int(config["r"]), lora_scale(config)
    shapes = {**shapes, **{name: (e.out_features, e.in_features) for e in experts for name in e.modules()}}
    shared = {each.name: each for each in experts}
    targets = targeted_modules(config["target_modules"], shapes)
    targeted = {*targets, *(name for name, each in shared.items() if not set(targets).isdisjoint(each.modules()))}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, part = module_and_part(name)
        if module not in shapes and module not in shared:
            raise EngineError(f"adapter tensor {name!r} matches no linear module of the model, nor experts")
        if module not in targeted:
            raise EngineError(f"adapter tensor {name!r}: {module} is not among the config's target_modules")
        each = shared.get(module)
        out_features, in_features = shapes[module] if each is None else (each.out_features, each.in_features)
        _check_tensor(name, tensor, (rank, in_features) if part == "A" else (out_features, rank))
        found.setdefault(module, {})[part] = tensor
    whole = _with_shared(found, experts)
    for module in targets:
        missing = {"A", "B"} - whole.get(module, {}).keys()
        if missing:
            raise EngineError(f"adapter is incomplete: target {module} has no lora_{min(missing)}")
    of_experts = {name for each in experts for name in each.modules()}
    matched = {name: LowRank(whole[name]["A"], whole[name]["B"], scale) for name in targets if name not in of_experts}
    for each in experts:
        if each.name in targeted:
            own = [whole[name] for name in each.modules()]
            matched[each.name] = LowRank(*(torch.stack([parts[part] for parts in own]) for part in "AB"), scale)
    return dict(sorted(matched.items()))


def matched_modules(
    tensors: Iterable[str], adapters: Mapping[str, LowRank], experts: Sequence[ExpertTarget] = ()
) -> tuple[str, ...]:
    """Those of an adapter's modules that `adapters` has: of experts each one's, and what all of them share. Sorted."""
    projection = {name: each.name for each in experts for name in (each.name, *each.modules())}
    modules = {module_and_part(name)[0] for name in tensors}
    return tuple(sorted(module for module in modules if projection.get(module, module) in adapters))


def _check_tensor(name: str, tensor: torch.Tensor, expected: tuple[int, int]) -> None:
    if tuple(tensor.shape) != expected:
        raise EngineError(f"adapter tensor {name!r} has shape {tuple(tensor.shape)}, the module needs {expected}")
    # The two extremes show every NaN and infinity, in a fifth of the time of a mask (measured).
    if not tensor.is_floating_point() or not all(map(math.isfinite, torch.stack(torch.aminmax(tensor)).tolist())):
        raise EngineError(f"adapter tensor {name!r} ({tensor.dtype}) holds what is not a finite float")


def _with_shared(
    found: Mapping[str, dict[str, torch.Tensor]], experts: Sequence[ExpertTarget]
) -> dict[str, dict[str, torch.Tensor]]:
    """With what experts share given to each of them. Raises EngineError for an expert that has that twice."""
    whole = {name: dict(parts) for name, parts in found.items()}
    for each in experts:
        for part, tensor in found.get(each.name, {}).items():
            for name in each.modules():
                if whole.setdefault(name, {}).setdefault(part, tensor) is not tensor:
                    raise EngineError(f"adapter: {name} has a lora_{part} of its own, and one that all experts share")
    return whole


def module_and_part(name: str) -> tuple[str, str]:
    """Of a tensor's name. Raises EngineError."""
    try:
        return split_tensor_name(name)
    except AdapterError as error:
        raise EngineError(str(error)) from error


def targeted_modules(targets: Sequence[str], modules: Mapping[str, Any]) -> list[str]:
    """Module names that PEFT's target list means (a full name, or the end of one after a dot), sorted."""
    matched = set()
    for target in targets:
        hits = [name for name in modules if means(target, name)]
        if not hits:
            raise EngineError(f"adapter target {target!r} matches no linear module of the model")
        matched.update(hits)
    return sorted(matched)

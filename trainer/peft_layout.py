"""An adapter as others store it: from the names of the adapter file to theirs, and from peft's back.

In the adapter file each expert's projection is a module of its own, and a shared-outer adapter has one tensor for what
its experts share (trainer.expert_lora). peft, on a model whose experts are fused (transformers 5), has one pair of
factors for gate_up_proj and one for down_proj, with all experts in them:

    ….experts.base_layer.lora_A  [experts · 2r, in]   gate's A over up's for each expert, the experts below one another
    ….experts.base_layer.lora_B  [2f, 2r · experts]   gate's B and up's on a diagonal; column j · experts + e
    ….experts.lora_A, .lora_B                         of down_proj likewise, with r

Gate and up have an A each, hence twice the rank, and twice alpha, which leaves the scale as it is. A linear layer of
such a model that has a projection's name (a dense layer's, a shared expert's) is told to peft as a parameter, its
weight: of target_modules peft would take the name for the experts'. By its source, vLLM takes these stacked names for
experts, too; peft alone was run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import means, split_tensor_name, tensor_name
from async_rl.policy.experts import DOWN, GATE, GATE_UP, UP

EXPERT = re.compile(rf"(?P<path>(?:.+\.)?experts)\.(?:(?P<expert>\d+)\.)?(?P<projection>{GATE}|{UP}|{DOWN})")
FUSED = re.compile(r"(?P<path>(?:.+\.)?experts)(?P<inner>\.base_layer)?")
PATTERNS = (GATE_UP, rf".*\.{GATE_UP}")  # of a LoraConfig, for gate and up together
OUTER = {GATE: "A", UP: "A", DOWN: "B"}  # what a shared-outer adapter shares

Tensors = dict[str, torch.Tensor]


class Module(NamedTuple):
    """What a tensor of an adapter file belongs to. Of experts: their module's path, which one (None: what all share),
    and which projection."""

    name: str
    part: str
    path: str = ""
    expert: int | None = None
    projection: str = ""


class PeftAdapter(NamedTuple):
    """Tensors by peft's names, and what its LoraConfig has to say of them."""

    tensors: Tensors
    config: dict[str, Any]


def module_of(name: str) -> Module:
    """Of a tensor's name. Raises AsyncRLError for one that is not an adapter's."""
    module, part = split_tensor_name(name)
    if not (found := EXPERT.fullmatch(module)):
        return Module(module, part)
    expert = None if found["expert"] is None else int(found["expert"])
    return Module(module, part, found["path"], expert, found["projection"])


# --- each expert, and all together -----------------------------------------------------------------------------------


def stacks(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Of experts, by path and projection: {"A": [experts, r, in], "B": [experts, out, r]}; what they share is a view
    that repeats. Raises AsyncRLError where an expert's tensor is missing."""
    found: dict[tuple[str, str], dict[str, dict[int | None, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        module = module_of(name)
        if module.path:
            parts = found.setdefault((module.path, module.projection), {"A": {}, "B": {}})
            parts[module.part][module.expert] = tensor
    return {key: _stacked(key, parts) for key, parts in sorted(found.items())}


def _stacked(key: tuple[str, str], parts: Mapping[str, Mapping[int | None, torch.Tensor]]) -> dict[str, torch.Tensor]:
    count = max(len(own) for own in parts.values())
    made = {}
    for part, own in parts.items():
        if own.keys() == {None}:
            made[part] = own[None].expand(count, -1, -1)
        elif own.keys() == set(range(count)):
            made[part] = torch.stack([own[expert] for expert in range(count)])
        else:
            raise AsyncRLError(f"adapter: {'.'.join(key)}: lora_{part} is not there for each of {count} experts")
    return made


def shared_again(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """With one tensor for what experts share, if all have the same outer half of every projection; else as it is."""
    found = stacks(tensors)
    outer = [parts[OUTER[projection]] for (_, projection), parts in found.items()]
    if not found or not all(len(each) > 1 and torch.equal(each, each[:1].expand_as(each)) for each in outer):
        return dict(tensors)
    made = dict(tensors)
    for (path, projection), parts in found.items():
        part = OUTER[projection]
        for expert in range(len(parts[part])):
            del made[tensor_name(f"{path}.{expert}.{projection}", part)]
        made[tensor_name(f"{path}.{projection}", part)] = parts[part][0]
    return dict(sorted(made.items()))


# --- peft ------------------------------------------------------------------------------------------------------------


def to_peft(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> PeftAdapter:
    """`config` is that of the adapter file. Raises AsyncRLError for tensors that are not an adapter's."""
    found = stacks(tensors)
    made = {name: tensor for name, tensor in tensors.items() if not module_of(name).path}
    linear = {module_of(name).name for name in made}
    rank, alpha = int(config["r"]), int(config["lora_alpha"])
    table: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "use_rslora": bool(config.get("use_rslora", False))}
    # Names that peft takes for the experts': here there are some, or a path in full tells these modules from them.
    targets = set(config["target_modules"])
    ambiguous = {name for name in linear if name.rpartition(".")[2] in (GATE, UP, DOWN) and (found or name in targets)}
    parameters = {f"{name}.weight" for name in ambiguous}
    table["target_modules"] = sorted(each for each in targets if any(means(each, name) for name in linear - ambiguous))
    if not found:
        return PeftAdapter(made, table | ({"target_parameters": sorted(parameters)} if parameters else {}))
    for path in sorted({path for path, _ in found}):
        down, fused = found.get((path, DOWN)), [found.get((path, projection)) for projection in (GATE, UP)]
        inner = path
        if down is not None:
            made |= _fused(path, down)
            parameters.add(f"{path}.{DOWN}")
            inner = f"{path}.base_layer"
        if any(each is not None for each in fused):
            made |= _fused(inner, _gate_up(*fused))
            parameters.add(f"{path}.{GATE_UP}")
    scale = {"rank_pattern": {GATE_UP: 2 * rank}, "alpha_pattern": {GATE_UP: _twice(alpha, table)}}
    table |= {"target_parameters": sorted(parameters)} | scale
    return PeftAdapter(dict(sorted(made.items())), table)


def _twice(alpha: int, table: Mapping[str, Any]) -> int:
    """The alpha that at twice the rank gives the same scale, alpha / r."""
    if table["use_rslora"]:
        raise AsyncRLError("adapter: experts with rank-stabilised LoRA cannot be told to peft: merge it instead")
    return 2 * alpha


def _gate_up(gate: dict[str, torch.Tensor] | None, up: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Both as one projection of twice the rank; one that is not adapted is zero."""
    some = gate or up
    assert some is not None
    nothing = {part: torch.zeros_like(stack) for part, stack in some.items()}
    gate, up = gate or nothing, up or nothing
    apart = torch.zeros_like(gate["B"])
    top, bottom = torch.cat([gate["B"], apart], dim=2), torch.cat([apart, up["B"]], dim=2)
    return {"A": torch.cat([gate["A"], up["A"]], dim=1), "B": torch.cat([top, bottom], dim=1)}


def _fused(path: str, parts: Mapping[str, torch.Tensor]) -> Tensors:
    """A [experts · r, in], B [out, r · experts]."""
    a, b = parts["A"], parts["B"]
    return {
        tensor_name(path, "A"): a.reshape(-1, a.shape[-1]),
        tensor_name(path, "B"): b.permute(1, 2, 0).reshape(b.shape[1], -1),
    }


def from_peft(tensors: Mapping[str, torch.Tensor], table: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and config of the adapter file, from those of a PEFT folder: of this layout, or with each expert's own
    names. Raises AsyncRLError for factors of gate_up_proj that are not one pair for gate and one for up, and for a
    rank or a scale of any module that is not that of the whole."""
    _check_patterns(table)
    rank, parameters = int(table["r"]), table.get("target_parameters") or ()
    config = {**table, "target_modules": set(table["target_modules"])}
    made: Tensors = {}
    modules = {module_of(name).name for name in tensors}
    of_experts = {name for name in modules if FUSED.fullmatch(name) or EXPERT.fullmatch(name)}
    for name in sorted(modules):
        a, b = (tensors[tensor_name(name, part)] for part in "AB")
        fused = FUSED.fullmatch(name)
        if fused is None:
            made |= {tensor_name(name, "A"): a, tensor_name(name, "B"): b}
            if f"{name}.weight" in parameters:
                config["target_modules"].add(name.rpartition(".")[2] if of_experts else name)
            continue
        path = fused["path"]
        if fused["inner"] or (_targets(table, path, GATE_UP) and not _targets(table, path, DOWN)):
            _check_fused_scale(name, table)
            parts = _gate_and_up(name, a, b, rank)
        else:
            parts = {DOWN: _unfused(a, b, rank)}
        config["target_modules"] |= parts.keys()
        for projection, stack in parts.items():
            for part, of_all in stack.items():
                for expert, tensor in enumerate(of_all.unbind()):
                    made[tensor_name(f"{path}.{expert}.{projection}", part)] = tensor.contiguous()
    config["target_modules"] = sorted(config["target_modules"])
    return shared_again(dict(sorted(made.items()))), config


def _check_patterns(table: Mapping[str, Any]) -> None:
    """An adapter file has one rank and one alpha: of what overrides them, only what `to_peft` writes is understood, and
    its other spelling, which is peft's own."""
    for kind, one in (("rank_pattern", table["r"]), ("alpha_pattern", table["lora_alpha"])):
        for key, value in (table.get(kind) or {}).items():
            if key not in PATTERNS or value != 2 * one:
                raise AsyncRLError(
                    f"PEFT folder: {kind} says {value} for {key!r}, but here all of an adapter has one rank and one "
                    "alpha: such an adapter can only be merged, by peft"
                )


def _check_fused_scale(name: str, table: Mapping[str, Any]) -> None:
    """Both patterns are there, and double the scale's both halves."""
    for kind in ("rank_pattern", "alpha_pattern"):
        if not table.get(kind):
            raise AsyncRLError(
                f"PEFT folder: {name} adapts gate_up_proj, but {kind} has no {GATE_UP!r}: its two halves would have "
                "another rank or scale than the rest; such an adapter can only be merged, by peft"
            )
    if table.get("use_rslora"):
        raise AsyncRLError(f"PEFT folder: {name}: experts with rank-stabilised LoRA can only be merged, by peft")


def _targets(table: Mapping[str, Any], path: str, parameter: str) -> bool:
    return any(means(target, f"{path}.{parameter}") for target in table.get("target_parameters") or ())


def _unfused(a: torch.Tensor, b: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    experts = len(a) // rank
    return {"A": a.reshape(experts, rank, -1), "B": b.reshape(len(b), rank, experts).permute(2, 0, 1)}


def _gate_and_up(name: str, a: torch.Tensor, b: torch.Tensor, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    a, b = _unfused(a, b, 2 * rank).values()
    half = b.shape[1] // 2
    if b[:, :half, rank:].any() or b[:, half:, :rank].any():
        raise AsyncRLError(
            f"PEFT folder: {name} adapts gate_up_proj by factors of rank {2 * rank} that are not one pair for "
            f"gate and one for up, of rank {rank} each: such an adapter can only be merged, by peft"
        )
    gate = {"A": a[:, :rank], "B": b[:, :half, :rank]}
    up = {"A": a[:, rank:], "B": b[:, half:, rank:]}
    return {key: own for key, own in ((GATE, gate), (UP, up)) if any(each.any() for each in own.values())}

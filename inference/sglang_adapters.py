"""Adapters as SGLang can take them.

It has one matrix for the query, key and value projections of a layer, and one for gate and up, also of each expert. Of
an adapter that has not all of those that lie in one, it refuses some and leaves others out without a word. So what is
missing is added: zeros, which change nothing. And each expert has tensors of its own here: what a shared-outer adapter
has once for all of a layer is given to each of them, in as many copies.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from async_rl.policy.adapter import TENSOR_PREFIX, shared_name, split_tensor_name, tensor_name
from async_rl.trainer_config import FEED_FORWARD
from inference.engine import EngineError

GATE_AND_UP = ("gate_proj", "up_proj")
TOGETHER = (("q_proj", "k_proj", "v_proj"), GATE_AND_UP)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
A, B = ".lora_A.weight", ".lora_B.weight"
WIDTH_ON_CPU = 32
"""What SGLang rounds intermediate widths up to on a CPU (its configs/update_config.py): there the weights are padded,
and adapters are not."""

Tensors = dict[str, torch.Tensor]


def check_adapter(name: str, folder: Path, device: str) -> None:
    """Raises EngineError for what SGLang would take for something else, or end at."""
    if json.loads((folder / CONFIG).read_text()).get("use_rslora"):
        raise EngineError(f"adapter {name}: SGLang scales by alpha / rank, whatever use_rslora says: train without it")
    if device == "cpu" and (odd := _odd_width(folder)):
        raise EngineError(
            f"adapter {name}: {odd[0]} has an intermediate width of {odd[1]}: on a CPU SGLang ends at an adapter where "
            f"that is no multiple of {WIDTH_ON_CPU}: adapt attention alone, or use another engine"
        )


def _odd_width(folder: Path) -> tuple[str, int] | None:
    """The first tensor, and the width."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        for name in sorted(file.keys()):
            module, part = split_tensor_name(name)
            last = module.rpartition(".")[2]
            if last in FEED_FORWARD and part == ("B" if last in GATE_AND_UP else "A"):
                width = file.get_slice(name).get_shape()[0 if part == "B" else 1]
                if width % WIDTH_ON_CPU:
                    return name, int(width)
    return None


def is_whole(folder: Path) -> bool:
    """Whether SGLang can take the adapter in `folder` as it is."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        names = set(file.keys())
    return not _shared(names) and not _missing_modules(names)


def write_whole(folder: Path, model_path: Path, whole: Path) -> None:
    """The adapter of `folder`, with what SGLang needs beside it, at `whole`. Raises EngineError when the model at
    `model_path` has no projection that it would have to have."""
    tensors = _given_to_each(load_file(folder / TENSORS))
    missing = _missing_modules(tensors)
    for module, sibling in missing.items():
        a, b = tensors[sibling + A], tensors[sibling + B]
        # Gate and up are of one shape; a checkpoint may have experts in any form.
        rows = len(b) if module.rpartition(".")[2] in GATE_AND_UP else _rows(model_path, module)
        tensors[module + A] = torch.zeros_like(a)
        tensors[module + B] = torch.zeros((rows, b.shape[1]), dtype=b.dtype)
    config = json.loads((folder / CONFIG).read_text())
    config["target_modules"] = sorted({*config["target_modules"], *(name.rpartition(".")[2] for name in missing)})
    whole.mkdir(mode=0o700)
    save_file(tensors, whole / TENSORS, metadata={"format": "pt"})
    (whole / CONFIG).write_text(json.dumps(config))


def _shared(names: Collection[str]) -> dict[str, list[str]]:
    """The tensors that all experts of a projection share, each with the names that every expert's would have."""
    experts: dict[str, list[str]] = {}
    for name in names:
        if (of_all := shared_name(name)) != name:
            experts.setdefault(of_all, []).append(name)
    return {name: [_other(each) for each in experts[_other(name)]] for name in names if _other(name) in experts}


def _other(name: str) -> str:
    """Of a module's A the name of its B, and the other way round."""
    module, part = split_tensor_name(name)
    return tensor_name(module, "B" if part == "A" else "A")


def _given_to_each(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    shared = _shared(tensors)
    own = {name: tensor for name, tensor in tensors.items() if name not in shared}
    return own | {each: tensors[name].clone() for name, names in shared.items() for each in names}


def _missing_modules(names: Iterable[str]) -> dict[str, str]:
    """Those that have to be added, each with one that is there and has the same input."""
    modules = {name.removesuffix(A) for name in names if name.endswith(A)}
    missing = {}
    for module in modules:
        parent, _, last = module.rpartition(".")
        for group in TOGETHER:
            if last in group:
                missing |= {f"{parent}.{each}": module for each in group if f"{parent}.{each}" not in modules}
    return missing


def _rows(model_path: Path, module: str) -> int:
    name = f"{module.removeprefix(TENSOR_PREFIX)}.weight"
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 (no mapping)
                rows: int = file.get_slice(name).get_shape()[0]
                return rows
    raise EngineError(f"{model_path}: there is no {name}, which SGLang has in one matrix with others of the adapter")

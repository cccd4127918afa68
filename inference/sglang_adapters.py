"""Adapters as SGLang can take them.

It has one matrix for the query, key and value projections of a layer, and one for gate and up. Of an adapter that has
not all of those that lie in one, it refuses some and leaves others out without a word. So what is missing is added:
zeros, which change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from async_rl.policy.adapter import TENSOR_PREFIX
from inference.engine import EngineError

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
A, B = ".lora_A.weight", ".lora_B.weight"


def check_config(name: str, folder: Path) -> None:
    """Raises EngineError for what SGLang would take for something else."""
    if json.loads((folder / CONFIG).read_text()).get("use_rslora"):
        raise EngineError(f"adapter {name}: SGLang scales by alpha / rank, whatever use_rslora says: train without it")


def missing_modules(folder: Path) -> dict[str, str]:
    """Those that have to be added to the adapter in `folder`, each with one that is there and has the same input."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        modules = {name.removesuffix(A) for name in file.keys() if name.endswith(A)}  # noqa: SIM118 (no mapping)
    missing = {}
    for module in modules:
        parent, _, last = module.rpartition(".")
        for group in TOGETHER:
            if last in group:
                missing |= {f"{parent}.{each}": module for each in group if f"{parent}.{each}" not in modules}
    return missing


def write_completed(folder: Path, missing: dict[str, str], model_path: Path, completed: Path) -> None:
    """The adapter of `folder` with the missing modules, at `completed`. Raises EngineError when the model at
    `model_path` has none of that name."""
    tensors = load_file(folder / TENSORS)
    for module, sibling in missing.items():
        rank = tensors[sibling + A].shape[0]
        tensors[module + A] = torch.zeros_like(tensors[sibling + A])
        out = _rows(model_path, f"{module.removeprefix(TENSOR_PREFIX)}.weight")
        tensors[module + B] = torch.zeros((out, rank), dtype=tensors[sibling + B].dtype)
    config = json.loads((folder / CONFIG).read_text())
    config["target_modules"] = sorted({*config["target_modules"], *(name.rpartition(".")[2] for name in missing)})
    completed.mkdir(mode=0o700)
    save_file(tensors, completed / TENSORS, metadata={"format": "pt"})
    (completed / CONFIG).write_text(json.dumps(config))


def _rows(model_path: Path, name: str) -> int:
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 (no mapping)
                rows: int = file.get_slice(name).get_shape()[0]
                return rows
    raise EngineError(f"{model_path}: there is no {name}, which SGLang has in one matrix with others of the adapter")

"""What a checkpoint of the sketch trainer holds, and reading it: everything is checked before anything is changed.

- weights.safetensors: all parameters, a snapshot under the digest of the weights themselves; backend.json names it.
- sketch.safetensors: second moments and the running mean. Projections are drawn again, never stored.
- update.safetensors: with publish = "factors" the policy file of these weights, so that it can be published once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from async_rl.errors import AsyncRLError
from async_rl.policy.tensor_file import read_header, read_tensors, write_tensors
from async_rl.policy.update_file import read_snapshot, write_snapshot
from trainer.optimizer_state import WEIGHTS_FILE, Counters, read_counters, write_counters
from trainer.sketch.step import Memory, Tensors

SKETCH_FILE = "sketch.safetensors"
UPDATE_FILE = "update.safetensors"
DRAW_KEY = "draw"


class Draw(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From what the projections in use were drawn, and at which step."""

    base_seed: int
    step: int


class Saved(NamedTuple):
    """Of the checkpoint: tensors are views of its files."""

    steps: int
    draw: Draw
    weights: Tensors
    memory: Memory


def write(
    folder: Path, parameters: Mapping[str, torch.Tensor], memory: Memory, draw: Draw, steps: int, model_path: str
) -> None:
    """Weights, state and counters; the update's file is the chain's to write."""
    digest = write_snapshot(folder / WEIGHTS_FILE, parameters, None, steps)
    write_tensors(folder / SKETCH_FILE, _flat(memory), {DRAW_KEY: msgspec.json.encode(draw).decode()})
    write_counters(folder, Counters(steps, digest, model_path, "sketch"))


def read(folder: Path, parameters: Mapping[str, torch.Tensor], memory: Memory, base_seed: int) -> Saved:
    """Raises AsyncRLError for files that are missing or broken, or that belong to another model, other targets, ranks
    or another seed."""
    counters = read_counters(folder, "sketch")
    path = folder / SKETCH_FILE
    header = read_header(path)
    try:
        draw = msgspec.json.decode(header.metadata.get(DRAW_KEY, "null"), type=Draw)
    except msgspec.DecodeError as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error}") from error
    if draw.base_seed != base_seed:
        raise AsyncRLError(
            f"checkpoint {folder}: its projections are drawn from seed {draw.base_seed}, this run's is "
            f"{base_seed}: resume with the configuration it was made with"
        )
    state, wanted = read_tensors(path, header), _flat(memory)
    _check(folder, state, wanted)
    weights = read_snapshot(folder / WEIGHTS_FILE, counters.digest).tensors
    _check(folder, weights, parameters)
    variance, mean = (
        {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith(part)}
        for part in ("variance/", "mean/")
    )
    return Saved(counters.optimizer_steps, draw, weights, Memory(variance, mean))


def _flat(memory: Memory) -> Tensors:
    variance = {f"variance/{name}": tensor for name, tensor in memory.variance.items()}
    return variance | {f"mean/{name}": tensor for name, tensor in memory.mean.items()}


def _check(folder: Path, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    if odd := sorted(found.keys() ^ wanted.keys()):
        raise AsyncRLError(f"checkpoint {folder}: has other tensors than this configuration needs: {odd[0]} and so on")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise AsyncRLError(
                f"checkpoint {folder}: {name} is {found[name].dtype} {list(found[name].shape)}, this configuration "
                f"needs {tensor.dtype} {list(tensor.shape)}"
            )

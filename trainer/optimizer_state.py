"""What a torch backend needs to go on exactly: the adapter, AdamW's moments and counters, in safetensors and JSON.

torch.save would be pickle, which runs code when it is read; these files can come from anyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import canonical_config, read_adapter

ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS_FILE = "backend.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of one parameter


class Counters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` is the policy's (of the adapter file beside it), `model_path` the base model's."""

    optimizer_steps: int
    digest: str
    model_path: str


def write(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, counters: Counters
) -> None:
    """optimizer.safetensors and backend.json beside the adapter file. Before the first step there are no moments."""
    moments = {
        f"{moment}/{name}": optimizer.state[parameter][moment].detach().cpu().contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }
    save_file(moments, folder / OPTIMIZER_FILE)
    (folder / COUNTERS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(counters)))


def read_counters(folder: Path) -> Counters:
    """Raises AsyncRLError when the file is missing or not ours."""
    path = folder / COUNTERS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Counters)
    except (OSError, msgspec.DecodeError) as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error}") from error


def read(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
) -> Counters:
    """Fill parameters and optimiser from a folder; everything is checked before anything is changed. Raises
    AsyncRLError for a broken file, or one that belongs to another adapter than `config`."""
    counters = read_counters(folder)
    tensors, saved_config = read_adapter(folder / ADAPTER_FILE, counters.digest)
    if canonical_config(saved_config) != canonical_config(config):
        raise AsyncRLError(
            f"checkpoint {folder}: its adapter is {canonical_config(saved_config)}, the configuration asks for "
            f"{canonical_config(config)}: resume with the configuration it was made with"
        )
    _check_shapes(folder, tensors, parameters)
    moments = _read_moments(folder, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    optimizer.state.clear()
    for name, state in moments.items():
        optimizer.state[parameters[name]] = state
    return counters


def _check_shapes(folder: Path, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    if tensors.keys() != parameters.keys():
        odd = sorted(tensors.keys() ^ parameters.keys())
        raise AsyncRLError(f"checkpoint {folder}: adapts other modules than this model has: {odd[0]} and so on")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape or tensors[name].dtype != parameter.dtype:
            raise AsyncRLError(
                f"checkpoint {folder}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, the model needs "
                f"{parameter.dtype} {list(parameter.shape)}"
            )


def _read_moments(folder: Path, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, torch.Tensor]]:
    """AdamW's state by parameter name, on each parameter's device; empty before the first step."""
    path = folder / OPTIMIZER_FILE
    try:
        flat = load_file(path)
    except (SafetensorError, OSError) as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error}") from error
    if not flat:
        return {}
    if flat.keys() != {f"{moment}/{name}" for name in parameters for moment in MOMENTS}:
        raise AsyncRLError(f"checkpoint file {path}: its tensors are not those of this adapter's AdamW")
    for name, parameter in parameters.items():
        if any(flat[f"{moment}/{name}"].shape != parameter.shape for moment in MOMENTS[:2]):
            raise AsyncRLError(f"checkpoint file {path}: moments of {name} have another shape than the parameter")
    return {
        name: {moment: flat[f"{moment}/{name}"].to(parameter.device) for moment in MOMENTS}
        for name, parameter in parameters.items()
    }

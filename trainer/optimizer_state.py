"""What a torch backend needs to go on exactly: counters, and for AdamW what learns and its moments, in safetensors and
JSON.

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

ADAPTER_FILE = "adapter.safetensors"  # kind "lora": an adapter file
WEIGHTS_FILE = "weights.safetensors"  # the other kinds: a snapshot of the whole model
OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS_FILE = "backend.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of one parameter


class Counters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` is the policy's (of the file beside it), `model_path` the base model's, `kind` that of the trainer."""

    optimizer_steps: int
    digest: str
    model_path: str
    kind: str = "lora"


def write_moments(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """optimizer.safetensors. A parameter has no moments before its first gradient."""
    moments = {
        f"{moment}/{name}": optimizer.state[parameter][moment].detach().cpu().contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }
    save_file(moments, folder / OPTIMIZER_FILE)


def write_counters(folder: Path, counters: Counters) -> None:
    """backend.json."""
    (folder / COUNTERS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(counters)))


def read_counters(folder: Path, kind: str | None = None) -> Counters:
    """Raises AsyncRLError when the file is missing or not ours, or of another trainer kind than `kind`."""
    path = folder / COUNTERS_FILE
    try:
        counters = msgspec.json.decode(path.read_bytes(), type=Counters)
    except (OSError, msgspec.DecodeError) as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error}") from error
    if kind is not None and counters.kind != kind:
        raise AsyncRLError(
            f'checkpoint {folder} is of [trainer] kind = "{counters.kind}", the configuration asks for "{kind}": '
            "resume with the configuration it was made with"
        )
    return counters


def read_adapter_tensors(folder: Path, counters: Counters, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of the checkpoint's adapter file. Raises AsyncRLError when it is broken, or is another adapter than `config`."""
    tensors, saved_config = read_adapter(folder / ADAPTER_FILE, counters.digest)
    if canonical_config(saved_config) != canonical_config(config):
        raise AsyncRLError(
            f"checkpoint {folder}: its adapter is {canonical_config(saved_config)}, the configuration asks for "
            f"{canonical_config(config)}: resume with the configuration it was made with"
        )
    return tensors


def restore(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Fill parameters from `tensors`, and the optimiser from the folder; everything is checked before anything is
    changed. Raises AsyncRLError for a broken file, or other shapes than the model's."""
    _check_shapes(folder, tensors, parameters)
    moments = _read_moments(folder, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    optimizer.state.clear()
    for name, state in moments.items():
        optimizer.state[parameters[name]] = state


def _check_shapes(folder: Path, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    if tensors.keys() != parameters.keys():
        odd = sorted(tensors.keys() ^ parameters.keys())
        raise AsyncRLError(f"checkpoint {folder}: has other tensors than what learns here: {odd[0]} and so on")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape or tensors[name].dtype != parameter.dtype:
            raise AsyncRLError(
                f"checkpoint {folder}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, the model needs "
                f"{parameter.dtype} {list(parameter.shape)}"
            )


def _read_moments(folder: Path, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, torch.Tensor]]:
    """AdamW's state by parameter name, on each parameter's device: of those that have had a gradient."""
    path = folder / OPTIMIZER_FILE
    try:
        flat = load_file(path)
    except (SafetensorError, OSError) as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error}") from error
    names = {key.partition("/")[2] for key in flat}
    if not names <= parameters.keys() or flat.keys() != {f"{moment}/{name}" for name in names for moment in MOMENTS}:
        raise AsyncRLError(f"checkpoint file {path}: its tensors are not those of AdamW on what learns here")
    for name in names:
        if any(flat[f"{moment}/{name}"].shape != parameters[name].shape for moment in MOMENTS[:2]):
            raise AsyncRLError(f"checkpoint file {path}: moments of {name} have another shape than the parameter")
    return {
        name: {moment: flat[f"{moment}/{name}"].to(parameter.device) for moment in MOMENTS}
        for name, parameter in parameters.items()
        if name in names
    }

"""Checkpoints of weights that are cut over ranks, by torch.distributed.checkpoint, in safetensors: no pickle.

Each rank writes its rows into one file, whose metadata say where they lie; a tensor "NAME" is a parameter,
"exp_avg/NAME", "exp_avg_sq/NAME" and "step/NAME" are AdamW's, the names that one process uses in its two files. So what
any number of ranks wrote, or one process, any number of ranks reads, or one process: what each needs of a tensor is put
together from the files that have some of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from async_rl.errors import AsyncRLError
from async_rl.policy.update_file import weights_digest
from trainer.optimizer_state import MOMENTS
from trainer.ranks import agreement

State = dict[str, torch.Tensor]
FILES = "shard-*.safetensors"  # as torch names them

# It says a line for every file that it writes.
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)


def state_of(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> State:
    """All that a checkpoint has, as it lies on this rank. A parameter has no moments before its first gradient."""
    state = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            state |= {f"{moment}/{name}": optimizer.state[parameter][moment] for moment in MOMENTS}
    return state


def write(folder: Path, state: State, device: torch.device) -> None:
    """Into a folder that all ranks see; on all of them at once. Raises AsyncRLError on all of them."""
    error = None
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(state, storage_writer=writer)
    except Exception as raised:
        error = AsyncRLError(f"{_first_line(raised)}")
    agreement.agree(error, f"writing a part of checkpoint {folder}", device)


def read(folder: Path, parameters: Mapping[str, torch.Tensor]) -> State:
    """What `write` was given, laid out as `parameters` are here: on ranks, which call it at once, their parts, in one
    process (without a process group) all of it. New tensors: nothing has changed when it raises AsyncRLError, for files
    that are missing or broken, or of another model."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
        with_moments = _check(folder, found, parameters)
        state = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
        for name in with_moments:
            for moment in MOMENTS[:2]:
                state[f"{moment}/{name}"] = torch.empty_like(parameters[name])
            state[f"step/{name}"] = torch.empty((), dtype=torch.float32)
        _fill(state, reader)
    except AsyncRLError:
        raise
    except Exception as error:
        raise AsyncRLError(f"checkpoint {folder}: cannot be read: {_first_line(error)}") from error
    return state


def read_weights(folder: Path, digest: str) -> State:
    """The parameters alone, whole, in one process. Raises AsyncRLError also when they are not those of `digest`."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in found.items()
            if isinstance(stored, TensorStorageMetadata) and "/" not in name
        }
        _fill(state, reader)
    except Exception as error:
        raise AsyncRLError(f"checkpoint {folder}: cannot be read: {_first_line(error)}") from error
    check_digest(folder, state, digest)
    return state


def check_digest(folder: Path, weights: Mapping[str, torch.Tensor], digest: str) -> str:
    """Raises AsyncRLError for other weights than those of `digest`, which is returned."""
    if (found := weights_digest(weights)) != digest:
        raise AsyncRLError(f"checkpoint {folder}: its weights are {found[:16]}…, backend.json says {digest[:16]}…")
    return digest


@torch.no_grad()
def restore(state: State, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Fill parameters and optimiser."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        parameter.copy_(state[name])
        if f"step/{name}" in state:
            optimizer.state[parameter] = {moment: state[f"{moment}/{name}"] for moment in MOMENTS}
            optimizer.state[parameter]["step"] = state[f"step/{name}"].to(parameter.device)


def _check(folder: Path, found: Mapping[str, object], parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """The parameters that have moments, sorted. Raises AsyncRLError for tensors other than those of `parameters`."""
    names = sorted(name.partition("/")[2] for name in found if name.startswith("step/"))
    wanted = {f"{moment}/{name}": name for name in names for moment in MOMENTS} | {name: name for name in parameters}
    if odd := sorted(found.keys() ^ wanted.keys()) or sorted(set(names) - parameters.keys()):
        raise AsyncRLError(f"checkpoint {folder}: has other tensors than what learns here: {odd[0]} and so on")
    for key, name in wanted.items():
        stored = found[key]
        assert isinstance(stored, TensorStorageMetadata)
        if not key.startswith("step/") and stored.size != parameters[name].shape:
            raise AsyncRLError(
                f"checkpoint {folder}: {key} is {list(stored.size)}, the model needs {list(parameters[name].shape)}"
            )
        if not key.startswith("step/") and stored.properties.dtype != parameters[name].dtype:
            raise AsyncRLError(
                f"checkpoint {folder}: {key} is {stored.properties.dtype}, the model needs {parameters[name].dtype}"
            )
    return names


def _fill(state: State, reader: HuggingFaceStorageReader) -> None:
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
        dcp.load(state, storage_reader=reader, no_dist=alone)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

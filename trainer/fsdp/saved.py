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
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from async_rl.errors import AsyncRLError
from async_rl.policy.update_file import weights_digest
from trainer.optimizer_state import COUNTERS_FILE, MOMENTS
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
    """Into a folder with its backend.json, that all ranks see; on all of them at once. Raises AsyncRLError on all of
    them."""
    # Else torch would make the folder where it is not, and the checkpoint lack that rank's rows.
    if blind := agreement.ranks_that(not (folder / COUNTERS_FILE).is_file(), device):
        raise AsyncRLError(
            f"checkpoint {folder}: rank {blind[0]} does not see what rank 0 has put there: a run's directory has to be "
            "one that the ranks of all machines share"
        )
    error = None
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(state, storage_writer=writer)
    except (Exception, CheckpointException) as raised:
        error = AsyncRLError(f"checkpoint {folder}: cannot be written: {_words(raised)}")
    agreement.agree(error, f"writing a part of checkpoint {folder}", device)


def lay_out(folder: Path, parameters: Mapping[str, torch.Tensor]) -> State:
    """New tensors for what `write` was given, laid out as `parameters` are here: on ranks their parts, in one process
    all of it. On each rank by itself. Raises AsyncRLError for files that are missing or broken, or of another model."""
    with_moments = _check(folder, _stored(folder), parameters)
    state = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
    for name in with_moments:
        for moment in MOMENTS[:2]:
            state[f"{moment}/{name}"] = torch.empty_like(parameters[name])
        state[f"step/{name}"] = torch.empty((), dtype=torch.float32)
    return state


def fill(folder: Path, state: State) -> None:
    """What `lay_out` has given; on all ranks at once, or in one process without a process group. Raises AsyncRLError,
    on all of them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
            reader = HuggingFaceStorageReader(str(folder))
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        raise AsyncRLError(f"checkpoint {folder}: cannot be read: {_words(error)}") from error


def read_weights(folder: Path, digest: str) -> State:
    """The parameters alone, whole, in one process. Raises AsyncRLError also when they are not those of `digest`."""
    state = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in _stored(folder).items()
        if isinstance(stored, TensorStorageMetadata) and "/" not in name
    }
    fill(folder, state)
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


def _stored(folder: Path) -> Mapping[str, object]:
    """What is said of each tensor."""
    try:
        found: Mapping[str, object] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise AsyncRLError(f"checkpoint {folder}: cannot be read: {_words(error)}") from error
    return found


def _words(error: BaseException) -> str:
    """One line. What went wrong on ranks, torch raises on all of them, with tracebacks, and not as an Exception."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_words(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Memory as benchmarks of the trainer measure it: a process's by what the kernel says of it, a GPU's by torch's own
count, and what a training step keeps, part by part."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from async_rl.errors import AsyncRLError
from trainer.adamw import AdamW
from trainer.learnable import Learnable
from trainer.sketch.weights import SketchWeights

MIB = 1 << 20
GIB = 1 << 30
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
MAPPED_BYTES = 256 << 10


# --- of a process ----------------------------------------------------------------------------------------------------


def map_large_tensors() -> None:
    """From now on every large tensor has a mapping of its own, so that memory is resident no longer than a tensor needs
    it. Raises AsyncRLError where there is no glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) != 1:
        raise AsyncRLError("the memory of tensors is measured with glibc's mallopt, which is not there")


def start_of_peak() -> int:
    """Forget the peak so far; returns the bytes resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise AsyncRLError(f"peak memory is read from /proc, as Linux has it: {error}") from error
    return process_bytes("VmRSS")


def process_bytes(field: str) -> int:
    """A field of /proc/self/status, in bytes: VmRSS is what is resident, VmHWM its peak. Raises AsyncRLError."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AsyncRLError(f"/proc/self/status has no {field}")


def limit_memory(device: torch.device, limit: int) -> None:
    """Let this process allocate at most `limit` bytes more on `device`."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole), device)
        return
    most = process_bytes("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether that is what an allocator raised: torch's own, CUDA's, or cuBLAS's for its workspace."""
    said = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in said)


# --- of a step -------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Bytes that are there while a backward pass ends: parameters (an adapter's too); gradients, or sketches with the
    signs of their projections; and the optimiser's state."""

    weights: int
    gradients: int
    optimiser: int


def kept(model: nn.Module, learnable: Learnable) -> Kept:
    """Of a learnable that has taken a step."""
    weights = _bytes(model.parameters())
    if isinstance(learnable, SketchWeights):
        signs = sum(block.rank * block.columns for block in learnable.blocks.values())  # a byte each, while it is used
        moments = _bytes(tensor for part in learnable.memory for tensor in part.values())
        return Kept(weights, learnable.sketches.flat.nbytes + signs, moments)
    if isinstance(learnable, AdamW):
        state = learnable.optimizer.state.values()
        return Kept(weights, _bytes(learnable.parameters.values()), _bytes(t for each in state for t in each.values()))
    raise AsyncRLError(f"{type(learnable).__name__}: it is not known what this keeps")


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def saved_activations(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps of a forward pass for the backward pass: on a GPU what is allocated more afterwards,
    else the saved tensors, those that share memory once and parameters not (with activation checkpointing a layer's
    input is not among them)."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        out = forward()
        torch.cuda.synchronize(device)
        grown = torch.cuda.memory_allocated(device) - before
        del out
        return grown
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(found.values())

"""megatron-core on a machine without a GPU: every call into CUDA that CPU ranks would make.

megatron-core asks for the current GPU and for streams as a matter of course. `install` answers with the CPU and with
streams that do nothing, once in a process and only where torch sees no GPU; on GPUs stock code runs. Each entry is
needed (tests/megatron/test_shim.py takes one away at a time). What needs none: random states (nothing is drawn at
random, see `settings`) and gradients of recomputed layers (torch's own checkpointing is used, see `model`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_installed = False


class Entry(NamedTuple):
    """What is put in the place of `owner.name`."""

    owner: Any
    name: str
    value: Any


def install() -> None:
    """Answer megatron-core's calls into CUDA, unless there is a GPU. The second time does nothing."""
    global _installed
    if torch.cuda.is_available() or _installed:
        return
    for entry in entries():
        setattr(*entry)
    _installed = True


def entries() -> Iterator[Entry]:
    """Made from stock code: not to be asked for again once they are installed."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    # Parameters and collectives' buffers are made on the current device.
    yield Entry(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # The all-to-all dispatcher copies its counts to the host on a stream of its own.
    yield Entry(torch.cuda, "Stream", _IdleStream)
    yield Entry(torch.cuda, "current_stream", lambda device=None: _IdleStream())
    yield Entry(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host)
    yield Entry(mappings, "_gather_along_first_dim", _gather(mappings._gather_along_first_dim))


class _IdleStream:
    """A stream, and the events of it, of a device that has none: all is done when a call returns."""

    def record_event(self) -> _IdleStream:
        return self

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Numbers of tokens as gloo's all-to-all takes them: plain integers, where stock code keeps a tensor of the CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(stock: Any) -> Any:
    """gloo gathers parts of one size only; the tokens of an expert's ranks (expert_tensor > 1) are as many as were
    routed to it on each. Parts are padded to the longest."""

    def gather(
        input_: torch.Tensor, group: Any, splits: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if group.size() == 1 or splits is None:
            out: torch.Tensor = stock(input_, group, splits, use_global_buffer)
            return out
        padded = input_.new_zeros(max(splits), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in splits]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, splits, strict=True)])

    return gather

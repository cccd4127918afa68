"""megatron-core on a machine without a GPU: every call into CUDA that CPU ranks would make.

megatron-core asks for the current GPU, for streams and for events as a matter of course. `install` answers with the CPU
and with streams that do nothing, once in a process and only where torch sees no GPU; on GPUs stock code runs. Each
entry says who asks. What needs no answer here: random states (nothing is drawn at random, see `settings`) and gradients
of recomputed layers (torch's own checkpointing is used, see `model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_installed = False


def install() -> None:
    """Answer megatron-core's calls into CUDA, unless there is a GPU. The second time does nothing."""
    global _installed
    if torch.cuda.is_available() or _installed:
        return
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    # Parameters and collectives' buffers are made on the current device.
    cuda.current_device = lambda: torch.device("cpu")
    # The all-to-all dispatcher copies its counts to the host on a stream of its own.
    cuda.Stream = cuda.Event = _Idle
    cuda.current_stream = lambda device=None: _IDLE
    mappings_: Any = mappings
    mappings_._gather_along_first_dim = _uneven_gather(mappings_._gather_along_first_dim)
    mappings_._reduce_scatter_along_first_dim = _uneven_scatter(mappings_._reduce_scatter_along_first_dim)
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _on_host
    _installed = True


class _Idle:
    """A stream, or an event, of a device that has neither: all is done when a call returns."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Idle:
        return self

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


_IDLE = _Idle()


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Numbers of tokens as gloo's all-to-all takes them: plain integers, where stock code keeps a tensor of the CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_gather(stock: Any) -> Any:
    """gloo gathers parts of one size only; the tokens of an expert's ranks (expert_tensor > 1) are as many as were
    routed to it on each. Parts are padded to the longest."""

    def gather(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if group.size() == 1 or output_split_sizes is None:
            return stock(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _uneven_scatter(stock: Any) -> Any:
    """The same of a sum whose parts go to one rank each: all of it is summed on every rank."""

    def scatter(
        input_: torch.Tensor,
        group: Any,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if group.size() == 1 or input_split_sizes is None:
            return stock(input_, group, input_split_sizes, use_global_buffer)
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    return scatter

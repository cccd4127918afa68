"""A model whose weights are cut over the ranks by torch's fully_shard (FSDP2): rows of each parameter.

Each decoder layer is gathered whole when it is computed, forwards and backwards, and let go again; what lies outside of
the layers (embedding, last norm, head) is gathered for as long as anything is computed. Gradients are summed, not
averaged: the loss has the denominators of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from async_rl.policy.experts import expert_modules
from async_rl.schema import ConfigError

Result = TypeVar("Result")


class Whole(nn.Module):
    """The root of a sharded model: whatever is called within has all weights that are not in a decoder layer, and each
    layer's when it is called. What it returns may be differentiated afterwards, if it is a tensor or several."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


def all_ranks(device: torch.device) -> DeviceMesh:
    """Of the default process group."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(model: PreTrainedModel, mesh: DeviceMesh, whole: Iterable[nn.Parameter] = ()) -> Whole:
    """Cut the parameters of `model` over the ranks of `mesh`, in place, and bring them to its device, a layer at a
    time; those in `whole` stay as they are, on each rank. From then on it is called through what this returns. Raises
    ConfigError for a model that cannot be cut."""
    if expert_modules(model):
        raise ConfigError(
            '[trainer.parallel] data: backend "torch" cuts no mixture of experts over ranks: set data = 1, or backend '
            '= "megatron"'
        )
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"[trainer.parallel] data: {type(model).__name__} has no decoder layers that are known here: set data = 1"
        )
    root, kept = Whole(model), set(whole)
    policy = MixedPrecisionPolicy(reduce_dtype=_wide(model))
    # The root too lets go of its weights after each forward pass: else the next one would not see that they moved.
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=kept)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return root


def _wide(model: nn.Module) -> torch.dtype | None:
    """In which gradients of half precision are summed; None leaves it to their own."""
    dtype = next(model.parameters()).dtype
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else None


class Rows(NamedTuple):
    """This rank's rows of a parameter: a view that may be written to, and the number of the first."""

    local: torch.Tensor
    first: int


def rows_of(parameter: torch.Tensor) -> Rows:
    """Of a parameter that `shard` has cut, while it is not gathered."""
    assert isinstance(parameter, DTensor)
    local, mesh = parameter.detach().to_local(), parameter.device_mesh
    return Rows(local, first_row(parameter.shape[0], mesh.get_local_rank(), mesh.size()))


def first_row(rows: int, rank: int, ranks: int) -> int:
    """Of a rank's part, as fully_shard deals rows out: as many to each as to the first, until there are no more."""
    return min(rank * -(-rows // ranks), rows)


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each tensor whole, one at a time, on the CPU of rank 0; None on the others. To be run through on all ranks at
    once."""
    first = dist.get_rank() == 0
    for name, tensor in tensors.items():
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        yield name, full.cpu() if first else None


def gather(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of them on rank 0; nothing on the others. On all ranks at once."""
    return {name: tensor for name, tensor in whole_tensors(tensors) if tensor is not None}

"""All weights as one process names and stores them (experts fused, tied ones once), whole on rank 0, and from there to
the ranks' parts: what digests, snapshots and checkpoints of kind "sketch" are made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from trainer.megatron.hf_weights import EXPERT, full_tensors
from trainer.megatron.model import ShardedModel
from trainer.megatron.pieces import pieces


@torch.no_grad()
def gather(model: ShardedModel, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On rank 0 every parameter, on the CPU; on the others nothing. `like` has the shapes and dtypes of all of them.
    Called on all ranks at once."""
    first = dist.get_rank() == 0
    whole = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in like.items()} if first else {}
    for name, value in full_tensors(model):
        if value is not None:
            _stored(whole, name).copy_(value)
    return whole


@torch.no_grad()
def fill(model: ShardedModel, whole: Mapping[str, torch.Tensor]) -> None:
    """This rank's parts, from every parameter (views of a file, of which just these parts are read)."""
    for piece in pieces(model):
        where = tuple(slice(first, first + size) for first, size in zip(piece.start, piece.size, strict=True))
        piece.local.copy_(_stored(whole, piece.name)[where].reshape(piece.local.shape))


def _stored(whole: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Where in them the tensor `name` lies, of experts one by one: a view."""
    fused = EXPERT.fullmatch(name)
    if fused is None:
        return whole[name]
    prefix, expert, part = fused.groups()
    if part == "down":
        return whole[f"{prefix}.down_proj"][int(expert)]
    return whole[f"{prefix}.gate_up_proj"][int(expert)].chunk(2)[part == "up"]

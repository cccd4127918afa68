"""What ranks tell one another about adapters: sums of gradients, the whole adapter on rank 0.

Every function is called on all ranks at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.megatron.slices import Axis, Owners, Piece, whole

_GROUP_NAMES: dict[Axis, str] = {
    "tensor": "tp",
    "data": "dp",
    "expert_tensor": "expt_tp",
    "expert": "ep",
    "expert_data": "expt_dp",
}
"""megatron-core's names for the groups."""


@torch.no_grad()
def sum_over_ranks(
    tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece], groups: ProcessGroupCollection
) -> None:
    """Each tensor, in place, becomes the sum over the axes of its piece: one exchange for all that have the same ones.
    What several ranks hold of one part is then the same on all of them, bit for bit."""
    alike: defaultdict[tuple[Axis, ...], list[torch.Tensor]] = defaultdict(list)
    for name in sorted(tensors):
        alike[pieces[name].sums].append(tensors[name])
    for axes, some in sorted(alike.items()):
        several = [group for group in (getattr(groups, _GROUP_NAMES[axis]) for axis in axes) if group.size() > 1]
        if not several:
            continue
        flat = torch.cat([tensor.flatten() for tensor in some])
        for group in several:
            dist.all_reduce(flat, group=group)
        for tensor, part in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(part.view_as(tensor))


def global_norm(tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece], device: torch.device) -> float:
    """The Frobenius norm of all tensors of all ranks, each element counted once; the same number on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, tensor in tensors.items():
        if pieces[name].owns:
            total += tensor.detach().double().square().sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def gather(tensors: Mapping[str, torch.Tensor], owners: Owners) -> dict[str, torch.Tensor]:
    """On rank 0 every tensor of the adapter file, whole and on the CPU; on the others nothing. Each rank sends what it
    owns as one message, so that rank 0 holds one rank's part beside what it has put together."""
    mine = dist.get_rank()
    some = next(iter(tensors.values()))
    if mine != 0:
        parts = [tensors[piece.name].detach().flatten() for piece in owners.of(mine)]
        if parts:
            dist.send(torch.cat(parts), 0)
        return {}
    full = {name: torch.zeros(shape, dtype=some.dtype) for name, shape in whole(owners.plan).items()}
    for rank in range(dist.get_world_size()):
        theirs = owners.of(rank)
        if rank == 0:
            parts = [tensors[piece.name].detach() for piece in theirs]
        elif theirs:
            sizes = [piece.local_shape[0] * piece.local_shape[1] for piece in theirs]
            buffer = torch.empty(sum(sizes), dtype=some.dtype, device=some.device)
            dist.recv(buffer, rank)
            parts = list(buffer.split(sizes))
        else:
            continue
        for piece, part in zip(theirs, parts, strict=True):
            full[piece.name][piece.index] = part.view(piece.local_shape).cpu()
    return full

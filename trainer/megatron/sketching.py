"""Gradient sketches of a model on ranks: S = G Aᵀ of each projection, and steps taken on the parts of the weights.

The algebra of kind "sketch" (docs/sketch.md) under tensor and expert ranks. A rank has the rows of S that it has of W.
Where W is cut by rows it knows x whole; with sequence parallelism just its tokens, and P = x Aᵀ [tokens, rank] of all
tokens is gathered, not x. Where W is cut by columns a rank knows these features of x, draws A's columns for them, and S
is the sum over the tensor ranks; with sequence parallelism P is summed first, and each rank goes on with its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.autograd.function import once_differentiable

from async_rl.policy.adapter import shared_name
from async_rl.policy.factors import Factors, apply_
from trainer.kernels.sketching import accumulate_, project
from trainer.megatron import collect
from trainer.megatron.lora import Site, find_sites
from trainer.megatron.model import ShardedModel
from trainer.megatron.pieces import pieces as base_pieces
from trainer.megatron.slices import SPLIT_BY_ROWS, Piece, Plan, locate, pieces, place_of
from trainer.sketch.projections import Projections


class Part(NamedTuple):
    """Of a projection's sketch on a rank: the part `piece` of the whole one, [rows, rank]; `columns` of A, first and
    one after the last, belong to what the rank knows of x; `key` is A's name, one for all experts."""

    key: str
    piece: Piece
    columns: tuple[int, int]


class Block(NamedTuple):
    """As in `Part`, with the `sketch` itself: float32, of the piece's local shape."""

    key: str
    piece: Piece
    columns: tuple[int, int]
    sketch: torch.Tensor


class ShardedSketches:
    """Sketches the gradients of `plan`'s modules in every backward pass from now on; its rank is the sketches', but for
    projections that `ranks` name by the last part of their paths. `base_seed` draws the projections."""

    def __init__(
        self, model: ShardedModel, plan: Plan, rank: int, base_seed: int, ranks: Mapping[str, int] | None = None
    ) -> None:
        self.model = model
        self.projections = Projections(base_seed, 0, model.device)
        self._parts = cache(partial(_parts, plan, ranks or {}))
        self.blocks = {
            module: Block(*part, torch.zeros(part.piece.local_shape, dtype=torch.float32, device=model.device))
            for module, part in self._parts(rank).items()
        }
        anchor = torch.zeros((), device=model.device, requires_grad=True)
        for site in find_sites(model):
            if any(path in self.blocks for path in site.projections):
                site.layer.register_forward_hook(partial(self._hook, site, anchor))

    def zero(self) -> None:
        for block in self.blocks.values():
            block.sketch.zero_()

    def reduce(self) -> None:
        """Once after the backward passes: then each rank's part is that of the whole batch's sketch."""
        sketches = {name: block.sketch for name, block in self.blocks.items()}
        collect.sum_over_ranks(sketches, self.pieces, self.model.groups)

    def norm(self) -> float:
        """Of all sketches together; the same number on every rank."""
        sketches = {name: block.sketch for name, block in self.blocks.items()}
        return collect.global_norm(sketches, self.pieces, self.model.device)

    def gather(self, into: Mapping[str, torch.Tensor]) -> None:
        """After `reduce`: all sketches whole, into the tensors by key of rank 0, [rows, rank] or of experts [experts,
        rows, rank]. Each rank sends what it owns as one message; `into` is of no use on the others."""
        if dist.get_rank() != 0:
            if flat := [self.blocks[module].sketch.flatten() for module in self._owned(dist.get_rank())]:
                dist.send(torch.cat(flat), 0)
            return
        for rank in range(dist.get_world_size()):
            theirs = self._owned(rank)
            sizes = [math.prod(part.piece.local_shape) for part in theirs.values()]
            if rank == 0:
                values = [self.blocks[module].sketch for module in theirs]
            elif theirs:
                buffer = torch.empty(sum(sizes), dtype=torch.float32, device=self.model.device)
                dist.recv(buffer, rank)
                values = list(buffer.split(sizes))
            for (module, part), value in zip(theirs.items(), values if theirs else (), strict=True):
                expert = locate(module).expert
                whole = into[part.key] if expert is None else into[part.key][expert]
                whole[part.piece.index] = value.view(part.piece.local_shape)

    def _owned(self, rank: int) -> dict[str, Part]:
        return {module: part for module, part in self._parts(rank).items() if part.piece.owns}

    @property
    def pieces(self) -> dict[str, Piece]:
        return {name: block.piece for name, block in self.blocks.items()}

    @torch.no_grad()
    def apply(self, factors: Mapping[str, Factors]) -> None:
        """W <- W − s·T of float32 weights, for `factors` whole by module path (q [rows, rank], s [rows]), of those that
        have some: on every rank its part, to the bits that one process would store."""
        for piece in base_pieces(self.model):
            module = piece.name.removesuffix(".weight")
            if module not in self.blocks or module not in factors:
                continue
            first, left = piece.start
            q, s = factors[module]
            # Megatron lays attention out group by group, so a projection's rows here are blocks of rows.
            for rows in piece.local.flatten(1, -2) if piece.local.dim() > 2 else piece.local[None]:
                part = Factors(q[first : first + len(rows)], s[first : first + len(rows)])
                key = self.projections.key(self.blocks[module].key)
                apply_(rows, part, key, start=left, total_columns=piece.shape[1], first_row=first)
                first += len(rows)

    def _hook(
        self, site: Site, anchor: torch.Tensor, layer: torch.nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return None
        blocks = [self.blocks.get(path) for path in site.projections]
        out, bias = output
        with torch.no_grad():
            x = inputs[0].flatten(0, -2)
            projected = [_shared_by_ranks(site, self._project(block, x)) for block in blocks if block is not None]
        return _Sketched.apply(out, anchor, site, blocks, *projected), bias

    def _project(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        """√rank · x Aᵀ, of the features of x that are known here: [tokens, rank]."""
        start, stop = block.columns
        rank = block.sketch.shape[1]
        drawn = partial(self.projections.some, block.key, rank, start, stop)
        return project(x, self.projections.key(block.key), rank, drawn, start=start)


class _Sketched(torch.autograd.Function):
    """Passes a layer's output on; backwards each projection's part of the gradient is added to its sketch."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, anchor: torch.Tensor, site: Site, blocks: list[Block | None], *of: torch.Tensor
    ) -> torch.Tensor:
        ctx.site, ctx.blocks = site, blocks
        ctx.save_for_backward(*of)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # once: where a layer is computed again, asking does it
        projected = iter(saved)
        for block, part in zip(ctx.blocks, ctx.site.split(gradient), strict=True):
            if block is not None:
                rank = block.sketch.shape[1]
                accumulate_(block.sketch, part.flatten(0, -2), next(projected), 1 / math.sqrt(rank))
        return (gradient, None, None, None, *(None for _ in saved))


def _shared_by_ranks(site: Site, projected: torch.Tensor) -> torch.Tensor:
    """P for the tokens whose gradient this rank will be given."""
    layer: Any = site.layer
    if site.expert or layer.tp_group.size() == 1 or not layer.sequence_parallel:
        return projected
    if site.by_rows:
        return gather_from_sequence_parallel_region(projected, group=layer.tp_group)
    return reduce_scatter_to_sequence_parallel_region(projected, group=layer.tp_group)


def _parts(plan: Plan, ranks: Mapping[str, int], rank: int) -> dict[str, Part]:
    """What a rank holds, by module path, sorted. A part of S is like that of a B [rows, rank]; only where W is cut by
    columns it is a sum over the tensor ranks in any case."""
    held = pieces(plan, place_of(rank, plan.parallel))
    parts = {}
    for module in {module for module, _ in held}:
        a, b = held[module, "A"], held[module, "B"]
        last = module.rpartition(".")[2]
        width = ranks.get(last, plan.rank)
        expert = locate(module).expert is not None
        over = () if last in SPLIT_BY_ROWS else ("expert_tensor" if expert else "tensor",)
        sums = (*over, "expert_data" if expert else "data")
        piece = b._replace(name=module, shape=(b.shape[0], width), columns=(0, width), sums=sums)
        parts[module] = Part(shared_name(module), piece, a.columns)
    return dict(sorted(parts.items()))

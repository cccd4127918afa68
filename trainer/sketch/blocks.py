"""What is sketched: row blocks of weights, each with a projection of its own.

An nn.Linear is one block. An expert weight that transformers fuses (gate_up_proj) is two, one behind the other: the
checkpoint has two projections there, and so have receivers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from trainer.kernels.sketching import accumulate_, accumulate_groups_, project
from trainer.sketch.projections import Projections


class Block(NamedTuple):
    """`name` is the projection's: the module's path in the checkpoint, without an expert's index; `module` the path of
    the module of this model that computes it; `weight` a view of its parameter, [rows, columns] or [experts, rows,
    columns]."""

    name: str
    module: str
    weight: torch.Tensor
    rank: int

    @property
    def columns(self) -> int:
        return self.weight.shape[-1]

    @property
    def sketch_shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], self.rank)


class Accumulator(NamedTuple):
    """A block and where its sketch S [..., rows, rank] is summed: S += gᵀ (x Aᵀ), float32."""

    block: Block
    sketch: torch.Tensor
    projections: Projections

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """√rank · x Aᵀ: [n, rank] in x's dtype, of x [n, columns]. The root is left for `add`, where it costs nothing
        and is not rounded to x's dtype."""
        name, rank, columns = self.block.name, self.block.rank, self.block.columns
        drawn = self.projections
        return project(x, drawn.key(name), rank, lambda: drawn.signs(name, rank, columns))

    def add(self, gradient: torch.Tensor, projected: torch.Tensor, bounds: torch.Tensor | None = None) -> None:
        """S += gradientᵀ · projected / √rank, of gradient [n, rows] and projected [n, rank]; with `bounds`, of each
        expert's rows into its own (see `async_rl.policy.grouped`)."""
        scale = 1 / math.sqrt(self.block.rank)
        if bounds is None:
            accumulate_(self.sketch, gradient, projected, scale)
        else:
            accumulate_groups_(self.sketch, gradient, projected, bounds, scale)

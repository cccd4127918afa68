"""One step of the sketch optimiser, before it is taken: from accumulated sketches to integers that say it exactly.

The sketches become directions where they lie: nothing else of their size is made, but the integers, half as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from async_rl.config import TrainerConfig
from async_rl.policy.factors import Factors, decode, encode
from async_rl.schema import ConfigError
from trainer.learnable import LowRank
from trainer.sketch.blocks import Block
from trainer.sketch.projections import Projections
from trainer.sketch.ratio import product_energy, step_size
from trainer.sketch.row_adam import row_adam_

Tensors = dict[str, torch.Tensor]


class Memory(NamedTuple):
    """What the optimiser remembers, by block: second moments [..., rows], and the running mean of the sketches
    [..., rows, rank] when it has one."""

    variance: Tensors
    mean: Tensors


class Step(NamedTuple):
    """A step not yet taken: length `size`, its factors at that length, and what the optimiser remembers after it."""

    size: float
    factors: dict[str, Factors]
    memory: Memory


class Tangents(Mapping[str, Sequence[LowRank]]):
    """The change of each weight as a product, by module, made when it is asked for: what the factors really do, so the
    negative of the direction. For experts b is [experts, rows, rank], and the module an ExpertProjection."""

    def __init__(self, blocks: Mapping[str, Block], factors: Mapping[str, Factors], projections: Projections) -> None:
        self._blocks = {block.module: block for name, block in blocks.items() if name in factors}
        self._factors, self._projections = factors, projections

    def __getitem__(self, module: str) -> Sequence[LowRank]:
        block = self._blocks[module]
        a = self._projections.matrix(block.name, block.rank, block.columns)
        return (LowRank(a, decode(self._factors[block.name]).neg_()),)

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)


def directions_(sketches: Tensors, memory: Memory, number: int, beta2: float, momentum: float) -> Memory:
    """Turn each sketch into RowAdam's direction D, in place; returns what is remembered after step `number` (from 1).
    With `momentum` the direction is that of the running mean, the balance of rows that of the sketch."""
    after = Memory({}, {})
    for name, sketch in sketches.items():
        rows = torch.linalg.vector_norm(sketch, dim=-1)
        if momentum:
            there = (rows.amax(-1) > 0)[..., None, None]
            moved = momentum * memory.mean[name] + (1 - momentum) * sketch
            after.mean[name] = torch.where(there, moved, memory.mean[name])
            sketch.copy_(after.mean[name])
        after.variance[name] = row_adam_(sketch, rows, memory.variance[name], number, beta2)
    return after


def length(
    directions: Tensors, blocks: Mapping[str, Block], projections: Projections, ratio: float, weights: torch.Tensor
) -> float:
    """k of the update ratio, for `weights` = ‖W‖² of all blocks together."""
    energies = [
        product_energy(direction, projections.gram(name, blocks[name].rank, blocks[name].columns))
        for name, direction in directions.items()
    ]
    return step_size(ratio, float(weights), float(torch.stack(energies).sum()))


def encoded(directions: Tensors, size: float) -> dict[str, Factors]:
    """All of them before any is applied: what cannot be encoded must not leave half a step behind. Raises AsyncRLError
    when a number is not finite. None at all for a step of length 0, which moves nothing."""
    return {} if size == 0 else {name: encode(direction * size) for name, direction in directions.items()}


def redraw(
    projections: Projections, blocks: Mapping[str, Block], memory: Memory, trainer: TrainerConfig, steps: int
) -> None:
    """Draw the directions of the step after `steps`, where it is to have new ones, and bring the running means over to
    them."""
    if steps % trainer.redraw_every:
        return

    def signs(name: str) -> torch.Tensor:
        return projections.signs(name, blocks[name].rank, blocks[name].columns)

    old = {name: signs(name) for name in memory.mean}
    projections.draw(steps)
    for name, mean in memory.mean.items():
        if trainer.carry_momentum:
            mean.copy_(carried(mean, old[name], signs(name)))
        else:
            mean.zero_()


def carried(mean: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """M A_old A_newᵀ: the running mean in the coordinates of a new projection (FLORA, arXiv 2402.03293), for M
    [..., rows, rank] and the signs int8 [rank, columns] of both projections."""
    between = old.float() @ new.float().T  # integers, exact
    return mean @ (between / old.shape[0])


def growth(columns: int, rank: int, momentum: float, redraw_every: int) -> float:
    """By what a mean that is carried over grows from one redraw to the next when nothing is added: its product with the
    projection is kept on average, and noise of √(columns/rank) times its norm comes with it. Below 1 it dies out."""
    carried_over: float = momentum**redraw_every * (columns / rank) ** 0.5
    return carried_over


def check_momentum(trainer: TrainerConfig, blocks: Mapping[str, Block]) -> None:
    """Raises ConfigError for a running mean that would outgrow everything."""
    if not (trainer.momentum and trainer.carry_momentum):
        return
    for name, block in blocks.items():
        if (grows := growth(block.columns, block.rank, trainer.momentum, trainer.redraw_every)) >= 1:
            raise ConfigError(
                f"[trainer] momentum = {trainer.momentum:g} with redraw_every = {trainer.redraw_every}: carried over "
                f"to new directions, the running mean of {name} (rank {block.rank} of {block.columns} columns) grows "
                f"by {grows:.3g} each time, and soon outweighs every gradient: raise redraw_every or rank, or set "
                "carry_momentum = false"
            )

"""Taking a step: factors applied to the weights, exactly, and how much of what was stored is rounding."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from async_rl.policy.factors import Factors, apply_, decode
from async_rl.policy.projection import ProjectionKey
from async_rl.policy.rounding import RoundingKey, rounding_key
from trainer.sketch.blocks import Block
from trainer.sketch.projections import Projections
from trainer.sketch.ratio import product_energy

log = logging.getLogger("trainer")

MEASURED = 1 << 18  # numbers of each weight whose rounding is measured: a per cent of error, and a copy that is small


class Change(NamedTuple):
    """Sums of squares: of what was meant, and of what was stored."""

    meant: float
    stored: float


def take_step(
    blocks: Mapping[str, Block], factors: Mapping[str, Factors], projections: Projections, update: int
) -> float | None:
    """W <- W − s·T for every block, as receivers do it. `update` is the step's number. With weights in bfloat16 returns
    how large the rounding is, ‖noise‖ / ‖update‖; else None."""
    total = Change(0.0, 0.0)
    for name, block in blocks.items():
        if name in factors:
            one = apply_step(block, factors[name], projections, update)
            total = Change(total.meant + one.meant, total.stored + one.stored)
    return noise_of(total)


def apply_step(block: Block, factors: Factors, projections: Projections, update: int, first_row: int = 0) -> Change:
    """One block's part of `take_step`, in place; of a block of which only the rows from `first_row` on are here, their
    part, to the same bits. What it returns is measured where weights are rounded, else 0."""
    key = projections.key(block.name)
    if block.weight.dtype != torch.bfloat16:
        apply_(block.weight, factors, key, first_row=first_row)
        return Change(0.0, 0.0)
    rounding = rounding_key(projections.base_seed, update, block.name)
    gram = projections.gram(block.name, block.rank, block.columns)
    return _apply_measured(block.weight, factors, key, rounding, gram, first_row)


def noise_of(change: Change) -> float | None:
    """‖noise‖ / ‖update‖; None where nothing was measured."""
    # Stored is meant and noise of mean 0, so their squares add up.
    return math.sqrt(max(change.stored - change.meant, 0.0) / change.meant) if change.meant > 0 else None


def warn_of_noise(noise: float | None, steps: int) -> None:
    if noise is not None and noise > 1:
        log.warning(
            "step %d: rounding to bfloat16 is %.1f times the update; a larger update_ratio, or float32, would "
            "drown less of it",
            steps,
            noise,
        )


def _apply_measured(
    weight: torch.Tensor,
    factors: Factors,
    key: ProjectionKey,
    rounding: RoundingKey,
    gram: torch.Tensor,
    first_row: int,
) -> Change:
    """`apply_`, the first rows of the first matrix apart from the rest."""
    matrices = weight if weight.dim() == 3 else weight[None]
    q, s = factors.q.view(-1, *factors.q.shape[-2:]), factors.s.view(-1, factors.s.shape[-1])
    rows = min(matrices.shape[1], max(1, MEASURED // matrices.shape[2]))
    first, some = matrices[0, :rows], Factors(q[0, :rows], s[0, :rows])
    before = first.float()
    apply_(first, some, key, first_row=first_row, rounding=rounding)
    stored = float((first.float() - before).double().square().sum())
    del before
    after = first_row + rows
    if rows < matrices.shape[1]:
        apply_(matrices[0, rows:], Factors(q[0, rows:], s[0, rows:]), key, first_row=after, rounding=rounding)
    if len(matrices) > 1:
        after = first_row + matrices.shape[1]
        apply_(matrices[1:], Factors(q[1:], s[1:]), key, first_row=after, rounding=rounding)
    whole = weight.numel() / first.numel()  # the rows that were not measured are taken to be like those that were
    return Change(whole * float(product_energy(decode(some), gram)), whole * stored)

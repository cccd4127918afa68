"""Taking a step: factors applied to the weights, exactly, and how much of what was stored is rounding."""

from __future__ import annotations

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
        if name not in factors:
            continue
        key = projections.key(name)
        if block.weight.dtype != torch.bfloat16:
            apply_(block.weight, factors[name], key)
            continue
        rounding = rounding_key(projections.base_seed, update, name)
        gram = projections.gram(name, block.rank, block.columns)
        one = _apply_measured(block.weight, factors[name], key, rounding, gram)
        total = Change(total.meant + one.meant, total.stored + one.stored)
    # Stored is meant and noise of mean 0, so their squares add up.
    return math.sqrt(max(total.stored - total.meant, 0.0) / total.meant) if total.meant > 0 else None


def _apply_measured(
    weight: torch.Tensor, factors: Factors, key: ProjectionKey, rounding: RoundingKey, gram: torch.Tensor
) -> Change:
    """`apply_`, the first rows of the first matrix apart from the rest."""
    matrices = weight if weight.dim() == 3 else weight[None]
    q, s = factors.q.view(-1, *factors.q.shape[-2:]), factors.s.view(-1, factors.s.shape[-1])
    rows = min(matrices.shape[1], max(1, MEASURED // matrices.shape[2]))
    first, some = matrices[0, :rows], Factors(q[0, :rows], s[0, :rows])
    before = first.float()
    apply_(first, some, key, rounding=rounding)
    stored = float((first.float() - before).double().square().sum())
    del before
    if rows < matrices.shape[1]:
        apply_(matrices[0, rows:], Factors(q[0, rows:], s[0, rows:]), key, first_row=rows, rounding=rounding)
    if len(matrices) > 1:
        apply_(matrices[1:], Factors(q[1:], s[1:]), key, first_row=matrices.shape[1], rounding=rounding)
    whole = weight.numel() / first.numel()  # the rows that were not measured are taken to be like those that were
    return Change(whole * float(product_energy(decode(some), gram)), whole * stored)

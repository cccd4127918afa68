"""RowAdam: Adam's second moment, one number per output row, applied to a sketch.

A row of the sketch S = G·Aᵀ has about the norm of that row of the gradient G whatever A was drawn, so what is
remembered per row survives a redraw; what is remembered per column would not. The layer keeps the norm of its sketch:
only the balance between rows changes (how long a step is, `trainer.sketch.ratio` decides, for all layers together).

Source of the formula: the gradient-sketch optimiser as published with NVIDIA's NeMo-RL (see docs/sketch.md).
"""

from __future__ import annotations

import torch

EPSILON = 1e-8


def row_adam_(
    direction: torch.Tensor, sketch_rows: torch.Tensor, variance: torch.Tensor, step: int, beta2: float
) -> torch.Tensor:
    """Scale the rows of `direction` [..., rows, rank] (float32) in place, and return the new second moment [..., rows].

    `sketch_rows` [..., rows] are the Euclidean norms of the sketch's rows, `variance` [..., rows] the moment so far (0
    before the first step), `step` counts from 1. Leading dimensions are matrices of their own (experts). With S the
    sketch, whose rows have `rank` columns:

        v  ← β₂ v + (1 − β₂) mean over columns of S²
        d  = √(v / (1 − β₂^step));  d ← d + max(ε · mean over rows of d, smallest float)
        c  = min(d) / d;  c ← c / √(mean over rows of c²)
        D  = c · direction;  D ← D · ‖direction‖ / ‖D‖

    A matrix whose sketch is 0 gets the direction 0, and its moment stays: an expert that saw no token neither moves nor
    forgets."""
    rank = direction.shape[-1]
    moved = beta2 * variance + (1 - beta2) / rank * sketch_rows.square()
    there = sketch_rows.amax(-1, keepdim=True) > 0
    moved = torch.where(there, moved, variance)
    root = (moved / (1 - beta2**step)).sqrt_()
    tiny = torch.finfo(root.dtype).tiny
    root = root + (EPSILON * root.mean(-1, keepdim=True)).clamp_min(tiny)
    scale = root.amin(-1, keepdim=True) / root
    scale = scale / scale.square().mean(-1, keepdim=True).sqrt()
    rows = torch.linalg.vector_norm(direction, dim=-1).double()
    before, after = (torch.linalg.vector_norm(norms, dim=-1, keepdim=True) for norms in (rows, scale * rows))
    kept = torch.where(after > 0, before / after.clamp_min(tiny), torch.zeros_like(after))
    direction.mul_((scale * kept * there).to(direction.dtype).unsqueeze(-1))
    return moved

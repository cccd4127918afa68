"""How long a step is: all weights together move by a given part of their norm.

A step of D adds D·A to a weight, and ‖D A‖ is what counts, not ‖D‖: for random A, E‖G AᵀA‖² = (1 + (columns − 1)/rank)
‖G‖². It is had from the small matrix A·Aᵀ, without the product.
"""

from __future__ import annotations

import math

import torch

NORM_BLOCK = 1 << 16  # numbers summed in float32 before float64 takes over: a relative error of some 1e-6 at most


def product_energy(direction: torch.Tensor, signs: torch.Tensor) -> float:
    """‖D A‖² = ⟨D (A Aᵀ), D⟩ in float64, for D float32 [..., rows, rank] and A = signs / √rank, int8 [rank, columns].
    Inner products of signs are integers, exact in float32 up to 2²⁴ columns."""
    rank = signs.shape[0]
    real = signs.float()
    gram = (real @ real.T).double() / rank
    rows = direction.reshape(-1, rank).double()
    return float((rows @ gram).mul_(rows).sum())


def weight_energy(weight: torch.Tensor) -> float:
    """‖W‖² of [..., rows, columns], summed in float32 within blocks of rows and in float64 over them. No temporary is
    as large as the weight."""
    rows = max(1, NORM_BLOCK // weight.shape[-1])
    matrices = weight if weight.dim() == 3 else weight[None]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for each in matrices for part in each.split(rows)]
    return float(torch.stack(norms).double().square().sum())


def step_size(ratio: float, weights: float, directions: float) -> float:
    """k with ‖k·D·A‖ = ratio · ‖W‖, of the sums of squares over all blocks; 0 when there is no direction."""
    return ratio * math.sqrt(weights / directions) if directions > 0 else 0.0

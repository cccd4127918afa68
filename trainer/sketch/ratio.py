"""How long a step is: all weights together move by a given part of their norm.

A step of D adds D·A to a weight, and ‖D A‖ is what counts, not ‖D‖: for random A, E‖G AᵀA‖² = (1 + (columns − 1)/rank)
‖G‖². It is had from the small matrix A·Aᵀ, without the product.
"""

from __future__ import annotations

import math

import torch

from async_rl.errors import AsyncRLError

ROWS = 4096
# Numbers summed in float32 before float64 takes over: an error of some 1e-6 at most, and on a GPU, which sums in a
# tree, not a launch for each cache's fill.
NORM_BLOCK = 1 << 16
NORM_BLOCK_GPU = 1 << 24


def product_energy(direction: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """‖D A‖² = ⟨D (A Aᵀ), D⟩, for D float32 [..., rows, rank] and A Aᵀ float64 [rank, rank]: float64, without axes."""
    total = torch.zeros((), dtype=torch.float64, device=direction.device)
    for part in direction.reshape(-1, direction.shape[-1]).split(ROWS):  # in blocks: the copies stay small
        rows = part.double()
        total += (rows @ gram).mul_(rows).sum()
    return total


def weight_energy(weight: torch.Tensor) -> torch.Tensor:
    """‖W‖² of [..., rows, columns], summed in float32 within blocks of rows and in float64 over them: float64, without
    axes. No temporary is as large as the weight."""
    rows = max(1, (NORM_BLOCK_GPU if weight.is_cuda else NORM_BLOCK) // weight.shape[-1])
    matrices = weight if weight.dim() == 3 else weight[None]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for each in matrices for part in each.split(rows)]
    return torch.stack(norms).double().square().sum()


def step_size(ratio: float, weights: float, directions: float) -> float:
    """k with ‖k·D·A‖ = ratio · ‖W‖, of the sums of squares over all blocks; 0 when there is no direction. Raises
    AsyncRLError when either sum is not finite."""
    if not (math.isfinite(weights) and math.isfinite(directions)):
        raise AsyncRLError(
            f"a sketched step: ‖W‖² is {weights:g} and that of its direction {directions:g}, not finite both; nothing "
            "was moved"
        )
    return ratio * math.sqrt(weights / directions) if directions > 0 else 0.0

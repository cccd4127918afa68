"""Sums over the tokens of one attempt, or over the attempts of one group: the only reductions the algorithm needs."""

from __future__ import annotations

import torch


def segment_count(index: torch.Tensor) -> int:
    """How many segments a non-negative int64 index spans (its maximum plus one; 0 when empty)."""
    return int(index.max()) + 1 if index.numel() else 0


def segment_sum(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum of `values` [n] per segment of `index` int64 [n], in the dtype of `values`: [segments]. Differentiable."""
    return values.new_zeros(segment_count(index)).index_add(0, index, values)


def segment_max(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Greatest of `values` [n] per segment of `index` int64 [n]: [segments], 0 for an index that does not occur."""
    return values.new_zeros(segment_count(index)).scatter_reduce(0, index, values, "amax", include_self=False)


def segment_mean(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Mean of `values` [n] per segment of `index` int64 [n]: [segments], 0 for an index that does not occur."""
    return segment_sum(values, index) / segment_sizes(index).clamp(min=1).to(values.dtype)


def segment_sizes(index: torch.Tensor) -> torch.Tensor:
    """Members of each segment: int64 [segments], 0 for an index that does not occur."""
    return torch.bincount(index, minlength=segment_count(index))

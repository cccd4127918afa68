"""Shaping: what is added to the rewards of a batch before advantages are computed from them."""

from __future__ import annotations

import torch


def overlong(lengths: torch.Tensor, limit: int, buffer: int, penalty: float) -> torch.Tensor:
    """What an answer of so many tokens loses by its length: float64 [attempts] from int64 [attempts].

    0 up to limit - buffer, then falling linearly to -penalty at `limit`, and -penalty beyond (soft overlong punishment,
    DAPO, arXiv 2503.14476). A `buffer` of 0 is no shaping. Raises ValueError for a buffer that is negative or beyond
    the limit."""
    if not 0 <= buffer <= limit:
        raise ValueError(f"an overlong buffer of {buffer} tokens in answers of at most {limit}")
    if not buffer:
        return torch.zeros(lengths.shape, dtype=torch.float64)
    return -penalty * ((lengths.double() - (limit - buffer)) / buffer).clamp(0.0, 1.0)

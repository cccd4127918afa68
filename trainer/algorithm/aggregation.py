"""Aggregation: from token losses to the batch's loss, as one coefficient per token.

The coefficients hold the *global* denominators and are computed once, over the whole batch. A micro-batch then adds
sum(coefficient · loss) over its own tokens, so loss and gradient do not depend on how the batch is split, packed or
ordered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.algorithm.segments import segment_sizes


def token_mean(attempt: torch.Tensor) -> torch.Tensor:
    """1 / trained tokens of the batch, for `attempt` int64 [n]: float64 [n]."""
    return torch.full_like(attempt, 1, dtype=torch.float64) / max(attempt.numel(), 1)


def sequence_mean(attempt: torch.Tensor) -> torch.Tensor:
    """The mean over attempts of each attempt's token mean: 1 / (attempts · its tokens), float64 [n]. Attempts without
    a trained token have no mean and are not counted."""
    size = segment_sizes(attempt)
    attempts = max(int((size > 0).sum()), 1)
    return 1.0 / (attempts * size[attempt].double())


AGGREGATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}

"""Aggregation: from token losses to the batch's loss, as one coefficient per token.

The coefficients hold the *global* denominators and are computed once, over the whole batch: all tokens that may train,
those included whose loss a gate then sets to 0. A micro-batch adds sum(coefficient · loss) over its own tokens, so loss
and gradient do not depend on how the batch is split, packed or ordered. Over several ranks, the counts of each are
added up first (`over_ranks`), and the gradients afterwards: it does not matter either how unevenly tokens are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from trainer.algorithm.segments import segment_sizes


class Denominators(NamedTuple):
    """What a batch has of each: trained tokens, and attempts and prompts (groups) with at least one. They add up over
    ranks, as an attempt is whole on one rank, and so is a prompt (which only `prompt_mean` needs)."""

    tokens: int
    attempts: int
    prompts: int


def denominators(attempt: torch.Tensor, group: torch.Tensor) -> Denominators:
    """Counts of a batch, or of one rank's part, from the attempt and the group of each trained token, int64 [n]."""
    return Denominators(attempt.numel(), int((segment_sizes(attempt) > 0).sum()), int((segment_sizes(group) > 0).sum()))


def over_ranks(part: Denominators) -> Denominators:
    """The whole batch's counts from this rank's part: summed over torch.distributed's default group, where there is
    one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return part
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    counts = torch.tensor(part, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(counts)
    return Denominators(*(int(count) for count in counts))


def token_mean(attempt: torch.Tensor, group: torch.Tensor, of: Denominators, length: int) -> torch.Tensor:
    """1 / trained tokens of the batch."""
    return torch.full_like(attempt, 1, dtype=torch.float64) / max(of.tokens, 1)


def sequence_mean(attempt: torch.Tensor, group: torch.Tensor, of: Denominators, length: int) -> torch.Tensor:
    """The mean over attempts of each attempt's token mean: 1 / (attempts · its tokens). Attempts without a trained
    token have no mean and are not counted."""
    return 1.0 / (max(of.attempts, 1) * segment_sizes(attempt)[attempt].double())


def prompt_mean(attempt: torch.Tensor, group: torch.Tensor, of: Denominators, length: int) -> torch.Tensor:
    """The mean over prompts of the token mean over all attempts of each: 1 / (prompts · tokens of its group) (ScaleRL,
    arXiv 2510.13786)."""
    return 1.0 / (max(of.prompts, 1) * segment_sizes(group)[group].double())


def constant(attempt: torch.Tensor, group: torch.Tensor, of: Denominators, length: int) -> torch.Tensor:
    """1 / (attempts · `length`), the same for a token of a long answer and of a short one (Dr. GRPO, arXiv
    2503.20783). Raises ValueError when `length` is below 1."""
    if length < 1:
        raise ValueError(f"aggregation by a constant length of {length}: it must be at least 1")
    return torch.full_like(attempt, 1, dtype=torch.float64) / (max(of.attempts, 1) * length)


AGGREGATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, Denominators, int], torch.Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "constant": constant,
}
"""From attempt and group of each trained token (int64 [n]), the batch's counts, and `aggregation_length`: a coefficient
for each token, float64 [n]."""

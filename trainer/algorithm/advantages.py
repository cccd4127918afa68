"""Advantages: from the rewards of a batch to one number per attempt.

Every rule takes `rewards` [attempts], finite, and `group` int64 [attempts], and gives float64 [attempts]. Attempts
whose rewards are all equal, over the group or (where the baseline is the batch's) over the batch, get exactly 0. So
does an attempt that is alone with its baseline: the rest of its group may have been dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rl.errors import AsyncRLError
from trainer.algorithm.segments import segment_count, segment_sizes, segment_sum

DEVIATION_EPSILON = 1e-6  # as in verl; only there to keep the quotient finite for tiny, non-zero deviations

Advantage = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def grpo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Group-relative advantage (r - mean) / (std + 1e-6) (DeepSeekMath, arXiv 2402.03300).

    std is the *population* deviation (divided by the group's size, not by one less), so a group's advantages have mean
    square 1 whatever its size."""
    deviation = dr_grpo(rewards, group)
    return deviation / (_root_mean_square(deviation, group) + DEVIATION_EPSILON)[group]


def dr_grpo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the group (Dr. GRPO, arXiv 2503.20783). The paper's other half, no division by an answer's length,
    is aggregation = "constant"."""
    rewards = rewards.double()
    size = segment_sizes(group).clamp(min=1)
    mean = segment_sum(rewards / size[group], group)
    # Decided on the rewards themselves: the mean of equal ones may be off by a rounding.
    lowest = rewards.new_zeros(segment_count(group)).scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = rewards.new_zeros(segment_count(group)).scatter_reduce(0, group, rewards, "amax", include_self=False)
    return torch.where((lowest == highest)[group], torch.zeros_like(rewards), rewards - mean[group])


def rloo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the *others* of the group (RLOO, arXiv 2402.14740), which is G / (G - 1) · (r - mean): a baseline
    that does not depend on the attempt itself, so the gradient is unbiased."""
    size = segment_sizes(group).double()
    return (size / (size - 1).clamp(min=1))[group] * dr_grpo(rewards, group)


def reinforce_pp(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) over the whole batch (REINFORCE++, arXiv 2501.03262), population deviation, one weight
    per attempt whatever its length. Needs no groups."""
    return grpo(rewards, torch.zeros_like(group))


def reinforce_pp_baseline(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(r - mean of the group) / (std of these over the batch + 1e-6) (REINFORCE++-baseline, arXiv 2501.03262)."""
    return batch_normalised(dr_grpo(rewards, group))


def maxrl(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(r - mean) / mean of the group (MaxRL, arXiv 2602.02710), 0 where the mean is: a prompt counts by the inverse of
    its pass rate. Raises AsyncRLError for a negative reward, whose quotient would point the wrong way."""
    rewards = rewards.double()
    if (rewards < 0).any():
        raise AsyncRLError(
            f'[algorithm] advantage = "maxrl" divides by the mean reward of a group, so no reward may be negative, '
            f'but one is {float(rewards.min()):g}: use advantage = "rloo" or "grpo", or a task whose rewards are not'
        )
    size = segment_sizes(group).clamp(min=1)
    mean = segment_sum(rewards / size[group], group)[group]
    deviation = dr_grpo(rewards, group)
    return torch.where(mean > 0, deviation / torch.where(mean > 0, mean, torch.ones_like(mean)), deviation)


def batch_mean(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the whole batch: for a single attempt per prompt (FlashREINFORCE). Needs no groups."""
    return dr_grpo(rewards, torch.zeros_like(group))


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "maxrl": maxrl,
    "batch_mean": batch_mean,
}


def unnormalised(advantages: torch.Tensor) -> torch.Tensor:
    return advantages


def batch_normalised(advantages: torch.Tensor) -> torch.Tensor:
    """A / (std of A over the batch + 1e-6), [attempts] (ScaleRL, arXiv 2510.13786). Every rule above gives a batch of
    mean 0, so the deviation is the root of the mean square, and what is exactly 0 stays so."""
    if not advantages.numel():
        return advantages
    return advantages / (
        _root_mean_square(advantages, torch.zeros_like(advantages, dtype=torch.int64)) + DEVIATION_EPSILON
    )


NORMALISATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"none": unnormalised, "batch": batch_normalised}


def _root_mean_square(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Of each group, [groups]; scaled by the largest first, as the square of a huge reward would overflow."""
    size = segment_sizes(group).clamp(min=1)
    largest = values.new_zeros(segment_count(group)).scatter_reduce(0, group, values.abs(), "amax")
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    return scale * (segment_sum((values / scale[group]).square(), group) / size).sqrt()

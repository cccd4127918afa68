"""Advantages: from the rewards of a batch to one number per attempt."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.algorithm.segments import segment_count, segment_sizes, segment_sum

GRPO_EPSILON = 1e-6  # as in verl; only there to keep the quotient finite for tiny, non-zero deviations


def grpo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Group-relative advantage (r - mean) / (std + 1e-6) (DeepSeekMath, arXiv 2402.03300).

    `rewards` [attempts] and `group` int64 [attempts] give float64 [attempts]. std is the *population* deviation
    (divided by the group's size, not by one less), so a group's advantages have mean square 1 whatever its size. A
    group whose rewards are all equal, one of a single attempt among them, gets exactly 0."""
    rewards = rewards.double()
    n = segment_count(group)
    size = segment_sizes(group).clamp(min=1)
    deviation = rewards - (segment_sum(rewards, group) / size)[group]
    std = (segment_sum(deviation.square(), group) / size).sqrt()
    # Decided on the rewards themselves: the mean of equal rewards may be off by a rounding, and the quotient then ±1.
    lowest = rewards.new_zeros(n).scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = rewards.new_zeros(n).scatter_reduce(0, group, rewards, "amax", include_self=False)
    advantages = deviation / (std + GRPO_EPSILON)[group]
    return torch.where((lowest == highest)[group], torch.zeros_like(advantages), advantages)


ADVANTAGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"grpo": grpo}

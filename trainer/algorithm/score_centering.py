"""Score centring: the off-policy policy gradient without a ratio, and without what a baseline would add to it.

Tokens of μ that are trained as if they were π_θ's do not only learn from A: under μ the score ∇ log π_θ(a) has the mean
Σ_j μ_j ∇ log π_θ(j), which is zero for π_θ = μ alone, and a constant in all advantages then moves the policy towards μ,
or away from it. That mean is taken away from each token's score.
"""

from __future__ import annotations

import torch


def centred_policy_gradient(current: torch.Tensor, advantage: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """-A · (log π_θ(a) - Σ_j μ_j log π_θ(j)): [n] of `current`, log π_θ(a), and `expected`, the sum over the k tokens
    that were likeliest under μ (trainer.head.head_logprobs_and_mean), [n] each, both with their gradients. A constant
    added to all advantages changes nothing in expectation, up to the probability that the k tokens leave out."""
    return -advantage * (current - expected)

"""Score centring: the off-policy policy gradient without a ratio, and without what a baseline would add to it.

Not a part that [algorithm] can name yet: it needs the log-probabilities of the sampler's k likeliest tokens at each
place, which engines do not send.
"""

from __future__ import annotations

import torch


def centred_policy_gradient(
    current: torch.Tensor, advantage: torch.Tensor, current_top: torch.Tensor, behaviour_top: torch.Tensor
) -> torch.Tensor:
    """-A · (log π_θ(a) - Σ_j μ_j log π_θ(j)), the sum over the k tokens that were likeliest under μ: [n].

    `current` and `advantage` are [n]; `current_top` (with its gradient) and `behaviour_top` are log-probabilities of
    the same k tokens under π_θ and μ, [n, k]. Under μ the score ∇ log π_θ(a) has the mean Σ_j μ_j ∇ log π_θ(j), which
    is zero only for π = μ; with it taken away, a constant added to all advantages changes nothing in expectation, up to
    the probability that the k tokens leave out. -inf in `behaviour_top` is a token that μ never samples."""
    probability = behaviour_top.detach().exp()
    expected = torch.where(probability > 0, probability * current_top, torch.zeros_like(probability)).sum(-1)
    return -advantage * (current - expected)

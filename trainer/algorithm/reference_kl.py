"""The distance to the reference policy, as a term of the loss or of the reward.

With d = log π_ref - log π_θ at a sampled token, the estimators of KL(π_θ ‖ π_ref) are (J. Schulman, "Approximating KL
divergence", 2020)

    k1 = -d            k2 = d²/2            k3 = e^d - 1 - d

What matters in a loss is not their mean but their gradient, and tokens are sampled from μ, not from π_θ:

    form        in the loss as it is                     times the ratio r = π_θ/μ (`reference_kl_ratio`)
    k1          0 in the mean, only noise: refused       ∇KL(π_θ ‖ π_ref), through r
    k2          ∇KL(π_θ ‖ π_ref) if μ = π_θ              the same for any μ; r is a constant there
    k3          ∇KL(π_ref ‖ π_θ) if μ = π_θ              ∇KL(π_θ ‖ π_ref), through r (DeepSeek-V3.2)

In the reward, which is a constant to the gradient, only k1 gives ∇KL(π_θ ‖ π_ref). All are of one token given what
comes before it, which μ sampled: what a token does to later ones is not in a term of the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rl.credit_config import CreditConfig
from trainer.algorithm.ratios import bounded_exp, k2_of, k3_of


def k1(gap: torch.Tensor) -> torch.Tensor:
    return -gap


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2_of, "k3": k3_of}
"""From d = log π_ref - log π_θ [n]; k3 clamps it to ±20."""


def token_penalties(
    current: torch.Tensor, reference: torch.Tensor, behaviour: torch.Tensor, form: str, weighted: bool
) -> torch.Tensor:
    """The estimator at each token [n], to be added to its loss; differentiable in `current` (log π_θ). `reference` and
    `behaviour` (log μ) are constants. With `weighted` it is multiplied by r = π_θ/μ, log r clamped to ±20, as the table
    above says."""
    value = FORMS[form](reference.detach() - current)
    if not weighted:
        return value
    ratio = bounded_exp(current - behaviour.detach())
    return (ratio.detach() if form == "k2" else ratio) * value


def partial_penalty(
    current: torch.Tensor,
    reference: torch.Tensor,
    behaviour: torch.Tensor,
    coefficients: torch.Tensor,
    credit: CreditConfig,
) -> torch.Tensor:
    """What these tokens add to the batch's loss by their distance (a scalar); `coefficients` [n] as in
    `trainer.algorithm.loss.partial_loss`."""
    value = token_penalties(current, reference, behaviour, credit.reference_kl, credit.reference_kl_ratio)
    return credit.reference_kl_weight * (coefficients.to(current.dtype) * value).sum()


def attempt_penalties(gap: torch.Tensor, attempt: torch.Tensor, attempts: int) -> torch.Tensor:
    """What an attempt's reward loses: Σ k1 over its tokens, float64 [attempts], from `gap` = log π_ref - log μ [n] and
    `attempt` int64 [n], below `attempts`. μ stands for π_θ, as the reward is that of what μ sampled."""
    total = gap.new_zeros(attempts, dtype=torch.float64)
    return total.index_add(0, attempt, k1(gap).double())

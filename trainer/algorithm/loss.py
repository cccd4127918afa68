"""The loss: ratio level → treatment → surrogate → aggregation, composed as [algorithm] says.

There is one optimiser step per batch. So during the forward pass the current policy *is* the proximal one, and one
pass gives both: proximal = current.detach(). The two differ only in what the gradient may flow through.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from async_rl.config import AlgorithmConfig
from trainer.algorithm.aggregation import AGGREGATIONS
from trainer.algorithm.ratios import LOG_RATIO_BOUND, TREATMENTS, importance_ratio, inside_bounds
from trainer.algorithm.surrogates import policy_gradient, ppo


class TokenData(NamedTuple):
    """Trained tokens, flat: behaviour log-probability [n] and advantage [n] (floating), attempt int64 [n] and age int64
    [n] in versions (that from which the step starts, less the token's). An attempt is whole: all its trained tokens are
    here."""

    behaviour: torch.Tensor
    advantage: torch.Tensor
    attempt: torch.Tensor
    age: torch.Tensor


def token_losses(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Loss of each token [n] before aggregation, differentiable in `current` (log π_θ, [n])."""
    low, high = algorithm.ratio_low, algorithm.ratio_high
    if algorithm.surrogate == "ppo":
        ratio = importance_ratio(current, data.behaviour, data.attempt, algorithm.ratio_level)
        return ppo(ratio, data.advantage, low, high)
    proximal = current.detach()
    ratio = importance_ratio(proximal, data.behaviour, data.attempt, algorithm.ratio_level)
    return policy_gradient(current, data.advantage, TREATMENTS[algorithm.treatment](ratio, low, high))


def batch_coefficients(attempt: torch.Tensor, algorithm: AlgorithmConfig) -> torch.Tensor:
    """The weight of each trained token of the *whole* batch in its loss: float64 [n]."""
    return AGGREGATIONS[algorithm.aggregation](attempt)


def partial_loss(
    current: torch.Tensor, data: TokenData, coefficients: torch.Tensor, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """What these tokens add to the batch's loss (a scalar); `coefficients` [n] are theirs of `batch_coefficients`."""
    return (coefficients.to(current.dtype) * token_losses(current, data, algorithm)).sum()


def ratio_metrics(proximal: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> dict[str, float]:
    """What the ratios π_prox/μ of a whole batch look like, each a mean over trained tokens unless it says otherwise:

    ratio_mean, ratio_max    the ratio at its level, before treatment
    kept_fraction            tokens whose ratio is inside the bounds
    ess                      effective sample size (Σw)²/(n·Σw²) of the treated weights, a fraction of n
    k3                       e^Δ - 1 - Δ with Δ = log π_prox - log μ (clamped to ±20): estimates KL(μ ‖ π_prox)
    mismatch_mean, _max      |Δ|
    entropy_proxy            -log π_prox of what was sampled
    tokens                   trained tokens

    Of an empty batch: the values of a perfect match, so that no alarm goes off."""
    if not proximal.numel():
        nothing = dict.fromkeys(("k3", "mismatch_mean", "mismatch_max", "entropy_proxy", "tokens"), 0.0)
        return dict.fromkeys(("ratio_mean", "ratio_max", "kept_fraction", "ess"), 1.0) | nothing
    proximal, behaviour = proximal.double(), data.behaviour.double()
    low, high = algorithm.ratio_low, algorithm.ratio_high
    ratio = importance_ratio(proximal, behaviour, data.attempt, algorithm.ratio_level)
    weight = TREATMENTS[algorithm.treatment](ratio, low, high)
    square = weight.square().sum()
    gap = proximal - behaviour
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mean_and_max = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "kept_fraction": inside_bounds(ratio, algorithm.treatment, low, high).double().mean(),
        "ess": torch.where(square > 0, weight.sum().square() / (weight.numel() * square), torch.zeros_like(square)),
        "k3": (bounded.expm1() - bounded).mean(),
        "mismatch_mean": gap.abs().mean(),
        "mismatch_max": gap.abs().max(),
        "entropy_proxy": -proximal.mean(),
    }
    return {name: float(value) for name, value in mean_and_max.items()} | {"tokens": float(weight.numel())}

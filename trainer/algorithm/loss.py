"""The loss: ratio level → treatment → surrogate → what trains → aggregation, composed as [algorithm] says.

With one optimiser step a batch (trainer.updates_per_batch = 1) the current policy *is* the proximal one, and one pass
gives both: proximal = current.detach(). The two differ only in what the gradient may flow through. Weights and gates
take π for the current policy in every step, so that the gradient is corrected for what sampled, not for what was.
"""

from __future__ import annotations

import torch

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.aggregation import AGGREGATIONS, denominators, over_ranks
from trainer.algorithm.custom import load_loss
from trainer.algorithm.keep import factor
from trainer.algorithm.ratios import bounds, importance_ratio, importance_weight
from trainer.algorithm.score_centering import centred_policy_gradient
from trainer.algorithm.surrogates import decoupled_ppo, log_linear_proximal, policy_gradient, ppo, tapered
from trainer.algorithm.tokens import TokenData, floored


def token_losses(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Loss of each token [n] before aggregation, differentiable in `current` (log π_θ, [n]), which may be -inf, and
    where scores are centred in `data.expected`."""
    current = floored(current)
    if algorithm.loss:
        return load_loss(algorithm.loss)(current, data)
    kept = factor(current, data, algorithm).to(current.dtype)
    return kept * _surrogate(current, data, algorithm)


def _surrogate(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    if algorithm.surrogate == "ppo":
        ratio = importance_ratio(current, data, algorithm.ratio_level)
        return ppo(ratio, data.advantage, *bounds(data, algorithm, ratio.dtype), algorithm.dual_clip)
    weight = surrogate_weight(current, data, algorithm)
    if algorithm.surrogate == "decoupled_ppo":
        proximal = _proximal(current, data, algorithm)
        clip = torch.full_like(current, algorithm.clip_low), torch.full_like(current, algorithm.clip_high)
        return decoupled_ppo(current, proximal, data.advantage, weight, clip, algorithm.dual_clip)
    if algorithm.center_scores:
        if data.expected is None:
            raise ValueError("center_scores needs TokenData.expected, which the backend computes")
        return centred_policy_gradient(current, data.advantage, floored(data.expected))
    return policy_gradient(current, data.advantage, weight)


def surrogate_weight(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    """What the surrogate weights each token with, a constant [n]; with "ppo", which has its ratio instead, that ratio
    between its bounds."""
    policy = _proximal(current, data, algorithm) if algorithm.surrogate == "decoupled_ppo" else current
    weight = importance_weight(policy, data, algorithm)
    return tapered(weight, data.advantage) if algorithm.surrogate == "topr" else weight


def _proximal(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    if algorithm.proximal == "log_linear":
        return log_linear_proximal(current, data.behaviour, data.age)
    return current.detach() if data.proximal is None else data.proximal


def batch_coefficients(
    attempt: torch.Tensor, group: torch.Tensor, algorithm: AlgorithmConfig, *, divided: bool = True
) -> torch.Tensor:
    """The weight of each trained token of the *whole* batch in its loss: float64 [n], from the attempt and the group of
    each, int64 [n]. On several ranks each has its tokens, and the denominators are those of all ranks; or, not
    `divided`, each has all of them."""
    of = denominators(attempt, group)
    of = over_ranks(of) if divided else of
    return AGGREGATIONS[algorithm.aggregation](attempt, group, of, algorithm.aggregation_length)


def partial_loss(
    current: torch.Tensor, data: TokenData, coefficients: torch.Tensor, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """What these tokens add to the batch's loss (a scalar); `coefficients` [n] are theirs of `batch_coefficients`."""
    return (coefficients.to(current.dtype) * token_losses(current, data, algorithm)).sum()

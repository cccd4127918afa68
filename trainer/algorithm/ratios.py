"""Importance ratios: how much likelier a policy makes what another one sampled, and what is done about it.

All tensors are flat, one entry per trained token. `policy` is a log-probability under the policy that is trained: as a
constant it gives weights, with its gradient the ratio inside a PPO surrogate. The other one is the engine's, μ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rl.algorithm_config import AlgorithmConfig, RatioLevel
from trainer.algorithm.segments import segment_max, segment_sizes, segment_sum
from trainer.algorithm.tokens import TokenData

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: far beyond any useful ratio, far from overflow even when squared in fp32


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio clamped to ±20; beyond that the gradient is zero."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def k2_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """½ (log ρ)² (J. Schulman, "Approximating KL divergence", 2020)."""
    return 0.5 * log_ratio.square()


def k3_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """ρ - 1 - log ρ, log ρ clamped to ±20: its mean over what q sampled, of ρ = p/q, is KL(q ‖ p) (as above)."""
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded.expm1() - bounded


def version_runs(data: TokenData) -> torch.Tensor:
    """int64 [n]: a number for each (attempt, version), the same for all its tokens."""
    ages = int(data.age.max()) + 1 if data.age.numel() else 1
    return torch.unique(data.attempt * ages + data.age, return_inverse=True)[1]


def _alone(delta: torch.Tensor, data: TokenData) -> torch.Tensor:
    return delta


def _product(delta: torch.Tensor, data: TokenData) -> torch.Tensor:
    return segment_sum(delta, data.attempt)[data.attempt]


def _mean(delta: torch.Tensor, data: TokenData) -> torch.Tensor:
    return _product(delta, data) / segment_sizes(data.attempt)[data.attempt].to(delta.dtype)


def _product_of_run(delta: torch.Tensor, data: TokenData) -> torch.Tensor:
    run = version_runs(data)
    return segment_sum(delta, run)[run]


LEVELS: dict[str, Callable[[torch.Tensor, TokenData], torch.Tensor]] = {
    "token": _alone,
    "sequence": _product,
    "geometric": _mean,
    "segment": _product_of_run,
}
"""From the tokens' log-ratios to those of what they belong to, at each token: itself; the product over the attempt;
the attempt's geometric mean (GSPO, arXiv 2507.18071), which does not grow with length; the product over those tokens of
the attempt that one policy version sampled."""


def importance_ratio(policy: torch.Tensor, data: TokenData, level: RatioLevel) -> torch.Tensor:
    """policy/μ at each token [n], at one of LEVELS. The log-ratio (where tokens are taken together: their sum or mean)
    is clamped to ±20 before exp, so beyond that the gradient through the ratio is zero. Every trained token of an
    attempt must be present.

    Differentiable in `policy`, and at every level through the token's own log-probability alone (as in GSPO-token,
    arXiv 2507.18071): through the attempt's whole ratio at each of its tokens, an attempt would count by the square of
    its length."""
    log_ratio = LEVELS[level]((policy - data.behaviour).detach(), data) + (policy - policy.detach())
    return bounded_exp(log_ratio)


def age_at_level(data: TokenData, level: RatioLevel) -> torch.Tensor:
    """int64 [n]: the age of what each token's ratio is of; of an attempt that of its oldest trained token."""
    if level in ("token", "segment"):
        return data.age
    return segment_max(data.age, data.attempt)[data.attempt]


def bounds(data: TokenData, algorithm: AlgorithmConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and highest ratio that each token may have, [n] each: ratio_low and ratio_high, raised to
    (1 + age)^age_power. A policy that has moved at random for d versions is about √d as far from itself, in log-ratio;
    the power says whether an old token may be further off for that (above 0), or has to be nearer (below 0)."""
    power = (1.0 + age_at_level(data, algorithm.ratio_level).to(dtype)) ** algorithm.age_power
    low, high = torch.full_like(power, algorithm.ratio_low), torch.full_like(power, algorithm.ratio_high)
    return low**power, high**power


def truncate(ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The ratio into [low, high], with low = 0 truncated importance sampling (IMPALA, arXiv 1802.01561)."""
    return ratio.clamp(low, high)


def mask(ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The ratio inside [low, high], zero outside (IcePop, arXiv 2510.18855)."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def uncorrected(ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Ones: as if the data were on-policy."""
    return torch.ones_like(ratio)


TREATMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "truncate": truncate,
    "mask": mask,
    "clip": truncate,  # a weight that is clipped is one that is truncated; only PPO's own clip is something else
    "uncorrected": uncorrected,
}


def importance_weight(policy: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    """The treated ratio policy/μ at each token [n], a constant."""
    ratio = importance_ratio(policy.detach(), data, algorithm.ratio_level)
    return TREATMENTS[algorithm.treatment](ratio, *bounds(data, algorithm, ratio.dtype))

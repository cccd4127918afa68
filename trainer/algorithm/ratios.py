"""Importance ratios: how much likelier a policy makes what another one sampled, and what is done about it.

All tensors are flat, one entry per trained token. `policy` is either the proximal log-probability (before the update;
gives weights) or the current one (gives the ratio inside a PPO surrogate); `behaviour` is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from trainer.algorithm.segments import segment_sum

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: far beyond any useful ratio, far from overflow even when squared in fp32


def token_log_ratio(delta: torch.Tensor, attempt: torch.Tensor) -> torch.Tensor:
    return delta


def sequence_log_ratio(delta: torch.Tensor, attempt: torch.Tensor) -> torch.Tensor:
    """The log of the product over all trained tokens of the attempt, at each of its tokens."""
    return segment_sum(delta, attempt)[attempt]


LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
}


def importance_ratio(
    policy: torch.Tensor, behaviour: torch.Tensor, attempt: torch.Tensor, level: Literal["token", "sequence"]
) -> torch.Tensor:
    """policy/behaviour at each token [n], of the token or of its whole attempt. The log-ratio (at sequence level: the
    sum) is clamped to ±20 before exp, so beyond that the gradient through the ratio is zero. `attempt` is int64 [n];
    every trained token of an attempt must be present.

    Differentiable in `policy`, and at either level through the token's own log-probability alone (as in GSPO-token,
    arXiv 2507.18071): through the attempt's whole ratio at each of its tokens, an attempt would count by the square of
    its length."""
    log_ratio = LEVELS[level]((policy - behaviour).detach(), attempt) + (policy - policy.detach())
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def truncate(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(ratio, high): truncated importance sampling. `low` has no part in it."""
    return ratio.clamp(max=high)


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The ratio into [low, high]."""
    return ratio.clamp(low, high)


def uncorrected(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Ones: as if the data were on-policy."""
    return torch.ones_like(ratio)


TREATMENTS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "truncate": truncate,
    "clip": clip,
    "uncorrected": uncorrected,
}


def inside_bounds(ratio: torch.Tensor, treatment: str, low: float, high: float) -> torch.Tensor:
    """Whether each ratio is within the bounds: bool [n]. Under `truncate` only the upper one counts; under
    `uncorrected` it is what a clip at these bounds would have kept."""
    inside = ratio <= high
    return inside if treatment == "truncate" else inside & (ratio >= low)

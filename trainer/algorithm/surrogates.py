"""Surrogates: the loss of one token, from its log-probability, advantage and ratio. Flat tensors [n] throughout.

Each says what its ratio is of, so that none is multiplied by the same ratio twice: weights are π/μ as constants, PPO's
ratio carries the gradient itself.
"""

from __future__ import annotations

import torch

from trainer.algorithm.ratios import bounded_exp


def policy_gradient(current: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """-w · A · log π_θ, with the importance weight w as a constant (its gradient is stopped here). With w = min(π/μ, C)
    of each token this is CISPO (MiniMax-M1, arXiv 2506.13585)."""
    return -weight.detach() * advantage * current


def tapered(weight: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """TOPR's weight [n] for policy_gradient, that of failures only: what went well is learned from however old it is,
    as in supervised learning; what went badly no more than the policy still does it (tapered off-policy REINFORCE,
    arXiv 2503.14286, there with w = min(π/μ, 1) of the whole answer)."""
    return torch.where(advantage > 0, torch.ones_like(weight), weight)


def ppo(
    ratio: torch.Tensor,
    advantage: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    dual_clip: float = 0.0,
) -> torch.Tensor:
    """-min(r · A, clip(r, low, high) · A) with r = π_θ/μ, through which the gradient flows (PPO, arXiv 1707.06347,
    with bounds of its own on either side as in DAPO). Never multiplied by a weight π/μ: r is one already.

    With `dual_clip` = c > 1, of a negative advantage the objective is at least c · A (dual-clip PPO, arXiv 1912.09729):
    otherwise a token that has become much likelier since it failed pushes without bound."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if dual_clip:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    return -objective


def log_linear_proximal(current: torch.Tensor, behaviour: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """log π_prox without a pass of its own, [n], a constant: between log μ and log π_θ by versions,
    log μ + a (log π_θ - log μ) with a = (v_prox - v_behaviour) / (v_θ - v_behaviour) (AReaL's approximation).

    v_prox is the version from which the step starts and v_θ = v_prox + 1 the one that it makes, so a = age / (1 + age):
    the clip sees a token's ratio as if each version since had its equal part in it, and judges the last one's."""
    share = age.to(current.dtype) / (1.0 + age.to(current.dtype))
    return behaviour + share * (current.detach() - behaviour)


def decoupled_ppo(
    current: torch.Tensor,
    proximal: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    dual_clip: float,
) -> torch.Tensor:
    """w · ppo(r) with r = π_θ/π_prox, through which the gradient flows, and w = π_prox/μ, treated, as a constant
    (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298): w accounts for who sampled, r bounds the step."""
    ratio = bounded_exp(current - proximal.detach())
    return weight.detach() * ppo(ratio, advantage, *bounds, dual_clip)

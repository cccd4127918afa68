"""Surrogates: the loss of one token, from its log-probability, advantage and ratio. Flat tensors [n] throughout."""

from __future__ import annotations

import torch


def policy_gradient(current: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """-w · A · log π_θ, with the importance weight w as a constant (its gradient is stopped here)."""
    return -weight.detach() * advantage * current


def ppo(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """-min(r · A, clip(r, low, high) · A) with r = π_θ/μ, through which the gradient flows (PPO, arXiv 1707.06347,
    with bounds of its own on either side as in DAPO). Never multiplied by an importance weight: r is one already."""
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

"""The divergence of two next-token distributions, from their logits: predicted from a direction, and as it became.

All sums are in float64, over a chunk of places at a time, so that no array of that width is as large as the logits.
"""

from __future__ import annotations

import torch

CHUNK = 64  # places at once


def quadratic(logits: torch.Tensor, change: torch.Tensor, temperature: float) -> torch.Tensor:
    """½ Var_p(change / temperature) with p = softmax(logits / temperature), each [n, vocabulary]: float64 [n], the
    Kullback-Leibler divergence that `change` causes, to second order (the Fisher information's quadratic form)."""
    p = torch.softmax(logits.double() / temperature, dim=-1)
    u = change.double() / temperature
    centred = u - (p * u).sum(-1, keepdim=True)
    return 0.5 * (p * centred.square()).sum(-1)


def divergence(before: torch.Tensor, after: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(softmax(before / temperature) ‖ softmax(after / temperature)) of logits [n, vocabulary] each: float64 [n]."""
    log_p, log_q = (torch.log_softmax(logits.double() / temperature, dim=-1) for logits in (before, after))
    return (log_p.exp() * (log_p - log_q)).sum(-1)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.algorithm.score_centering import centred_policy_gradient

V = 6


def expected_under(mu: torch.Tensor, log_pi: torch.Tensor, k: int) -> torch.Tensor:
    """Σ_j μ_j log π(j) over the k likeliest, a sum of products."""
    return torch.stack([mu[j].exp() * log_pi[j] for j in mu.argsort(descending=True)[:k].tolist()]).sum()


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(V, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def expected_gradient(logits: torch.Tensor, mu: torch.Tensor, advantage: torch.Tensor, k: int) -> torch.Tensor:
    """Σ_a μ(a) ∇ loss(a) over every token."""
    leaf = logits.clone().requires_grad_()
    log_pi = torch.log_softmax(leaf, 0)
    losses = centred_policy_gradient(log_pi, advantage, expected_under(mu, log_pi, k).expand(V))
    (gradient,) = torch.autograd.grad((mu.exp() * losses).sum(), leaf)
    return gradient


@pytest.mark.parametrize("k", [1, 3, V])
def test_loss_and_gradient_equal_sums_in_plain_floats(k: int) -> None:
    logits, other = policies(0)
    mu = torch.log_softmax(other, 0)
    top = mu.topk(k).indices.tolist()
    leaf = logits.clone().requires_grad_()
    log_pi = torch.log_softmax(leaf, 0)
    expected = expected_under(mu, log_pi, k)[None]
    loss = centred_policy_gradient(log_pi[[2]], torch.tensor([-1.5]).double(), expected)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    pi = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum()
    q = np.exp(mu.numpy())
    mean = math.fsum(q[j] * math.log(pi[j]) for j in top)
    assert float(loss.detach()[0]) == pytest.approx(1.5 * (math.log(pi[2]) - mean), rel=1e-12)
    for i in range(V):
        score = (i == 2) - pi[i]
        centre = math.fsum(q[j] * ((i == j) - pi[i]) for j in top)
        assert float(gradient[i]) == pytest.approx(1.5 * (score - centre), rel=1e-12, abs=1e-15)


def test_a_constant_advantage_moves_nothing_however_far_apart_the_policies_are() -> None:
    logits, other = policies(1)
    mu = torch.log_softmax(3 * other, 0)
    constant = torch.full((V,), 7.0, dtype=torch.float64)
    assert float(expected_gradient(logits, mu, constant, V).abs().max()) < 1e-14
    assert float(expected_gradient(logits, mu, constant, V - 1).abs().max()) > 1e-4  # the tail that is left out


def test_between_equal_policies_it_is_the_policy_gradient() -> None:
    logits, _ = policies(2)
    mu = torch.log_softmax(logits, 0)
    advantage = torch.linspace(-1, 2, V, dtype=torch.float64)
    pi = mu.exp()
    exact = -pi * (advantage - (pi * advantage).sum())
    torch.testing.assert_close(expected_gradient(logits, mu, advantage, V), exact, rtol=1e-12, atol=1e-14)

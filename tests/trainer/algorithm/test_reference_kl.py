"""Reference KL against closed forms: on a small softmax policy every expectation is a sum over its actions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from trainer.algorithm.reference_kl import FORMS, attempt_penalties, token_penalties

ACTIONS = 5


def policies(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of π_θ and the log-probabilities of π_ref and μ, all different."""
    generator = np.random.default_rng(seed)
    logits, reference, behaviour = generator.normal(0, 1, (3, ACTIONS))
    return logits, log_softmax(reference), log_softmax(behaviour)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - math.log(math.fsum(np.exp(logits).tolist()))


def kl(left: np.ndarray, right: np.ndarray) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(left, right, strict=True))


def numeric_gradient(function: Callable[[np.ndarray], float], logits: np.ndarray) -> np.ndarray:
    out = np.zeros(ACTIONS)
    for action in range(ACTIONS):
        step = np.zeros(ACTIONS)
        step[action] = 1e-6
        out[action] = (function(logits + step) - function(logits - step)) / 2e-6
    return out


def expected_gradient(form: str, weighted: bool, on_policy: bool) -> tuple[np.ndarray, float]:
    """Gradient in the logits, and value, of the mean over μ (every action once, by its probability)."""
    logits, reference, behaviour = policies()
    mu = log_softmax(logits) if on_policy else behaviour
    leaf = torch.from_numpy(logits.copy()).requires_grad_()
    current = torch.log_softmax(leaf, 0)
    penalties = token_penalties(current, torch.from_numpy(reference), torch.from_numpy(mu), form, weighted)
    value = (torch.from_numpy(np.exp(mu)) * penalties).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient.numpy(), value.item()


def reverse(logits: np.ndarray) -> float:
    return kl(log_softmax(logits), policies()[1])


def forward(logits: np.ndarray) -> float:
    return kl(policies()[1], log_softmax(logits))


def second_moment(logits: np.ndarray) -> float:
    current, reference = log_softmax(logits), policies()[1]
    return math.fsum(math.exp(a) * (a - b) ** 2 / 2 for a, b in zip(current, reference, strict=True))


@pytest.mark.parametrize("form", ["k1", "k2", "k3"])
def test_weighted_by_the_ratio_every_form_has_the_gradient_of_the_kl_whoever_sampled(form: str) -> None:
    gradient, value = expected_gradient(form, weighted=True, on_policy=False)
    np.testing.assert_allclose(gradient, numeric_gradient(reverse, policies()[0]), atol=1e-8)
    expected = second_moment if form == "k2" else reverse
    assert value == pytest.approx(expected(policies()[0]), rel=1e-9)


def test_unweighted_on_policy_gradients_are_those_that_the_table_says() -> None:
    logits = policies()[0]
    np.testing.assert_allclose(expected_gradient("k1", False, True)[0], np.zeros(ACTIONS), atol=1e-12)
    np.testing.assert_allclose(expected_gradient("k2", False, True)[0], numeric_gradient(reverse, logits), atol=1e-8)
    np.testing.assert_allclose(expected_gradient("k3", False, True)[0], numeric_gradient(forward, logits), atol=1e-8)
    # The two divergences pull differently here, so the table's distinction is one.
    assert np.abs(numeric_gradient(reverse, logits) - numeric_gradient(forward, logits)).max() > 0.05


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_unweighted_off_policy_the_gradient_is_another(form: str) -> None:
    gradient = expected_gradient(form, weighted=False, on_policy=False)[0]
    assert np.abs(gradient - numeric_gradient(reverse, policies()[0])).max() > 0.05


def test_k1_in_the_reward_has_the_gradient_of_the_kl() -> None:
    """E[-reward · ∇log π] with a reward that is a constant to the gradient."""
    logits, reference, _ = policies()
    mu = log_softmax(logits)
    penalty = attempt_penalties(torch.from_numpy(reference - mu), torch.arange(ACTIONS), ACTIONS).numpy()
    scores = np.eye(ACTIONS) - np.exp(mu)
    gradient = (np.exp(mu)[:, None] * penalty[:, None] * scores).sum(0)
    np.testing.assert_allclose(gradient, numeric_gradient(reverse, logits), atol=1e-8)


def test_attempt_penalties_sum_over_an_attempts_tokens_and_are_zero_where_it_has_none() -> None:
    out = attempt_penalties(torch.tensor([-0.5, 1.0, 0.25]), torch.tensor([0, 0, 2]), 4)
    assert out.tolist() == [-0.5, 0, -0.25, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_gap_of_200_stays_finite_in_float32(form: str, weighted: bool, gap: float) -> None:
    current = torch.tensor([-1.0, -1.0 - abs(gap)], requires_grad=True)
    other = torch.tensor([-1.0 - abs(gap), -1.0])
    value = token_penalties(current, other, other, form, weighted).sum()
    (gradient,) = torch.autograd.grad(value, current)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_itself_costs_nothing(form: str) -> None:
    same = torch.tensor([-0.3, -4.0])
    assert token_penalties(same, same, same, form, True).tolist() == [0.0, 0.0]

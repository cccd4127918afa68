"""A policy so small that every answer can be listed: exact expectations of the gradient that a correction gives.

Answers are of at most three tokens out of {end, a, b}; the policy has a softmax for each (place, token before). So
there are 15 answers, and the expectation of an estimator under the policy that sampled is a sum of 15 terms. The
policy that samples has drifted from the one that is trained by a random walk of the logits, a step a version, and a
newer version samples the last token. Whole answers are added up (no denominator), so that the estimand is the gradient
of the expected advantage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.loss import token_losses
from trainer.algorithm.tokens import TokenData

TOKENS, LONGEST, END = 3, 3, 0
STEP = 0.15  # of the random walk of each logit, per version


class Problem(NamedTuple):
    """Every answer's tokens, flat: `where` int64 [n, 3] is (place, token before, token), `answer` int64 [n]. Logits
    float64 [3, 3, 3] of the trained policy and of the one that sampled, log μ [n] and ages int64 [n] of the tokens,
    `advantage` [answers]."""

    where: torch.Tensor
    answer: torch.Tensor
    logits: torch.Tensor
    sampling: torch.Tensor
    behaviour: torch.Tensor
    age: torch.Tensor
    advantage: torch.Tensor


def answers(longest: int) -> list[list[int]]:
    done, open_ = [], [[]]
    for _ in range(longest):
        longer = [[*each, token] for each in open_ for token in range(TOKENS)]
        done += [each for each in longer if each[-1] == END]
        open_ = [each for each in longer if each[-1] != END]
    return done + open_


def problem(age: int, longest: int = LONGEST, seed: int = 0, one_sided: bool = False) -> Problem:
    """The policy of `age` versions ago sampled all but the third token, one version later the third."""
    generator = np.random.default_rng(seed)
    listed = answers(longest)
    where = [(place, ([END, *each])[place], token) for each in listed for place, token in enumerate(each)]
    logits = generator.normal(0, 0.7, (LONGEST, TOKENS, TOKENS))
    walk = generator.normal(0, STEP, (age + 1, LONGEST, TOKENS, TOKENS))
    older = logits + walk[:age].sum(0)
    newer = logits + walk[: max(age - 1, 0)].sum(0)
    sampling = np.stack([newer[place] if place == 2 else older[place] for place in range(LONGEST)])
    advantage = generator.normal(0, 1, len(listed))
    places = torch.tensor(where)
    return Problem(
        places,
        torch.tensor([index for index, each in enumerate(listed) for _ in each]),
        torch.from_numpy(logits),
        torch.from_numpy(sampling),
        token_logprobs(torch.from_numpy(sampling), places),
        torch.where(places[:, 0] == 2, max(age - 1, 0), age),
        torch.from_numpy(np.abs(advantage) if one_sided else advantage),
    )


def token_logprobs(logits: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token [n]; differentiable in the logits."""
    place, before, token = where.T
    return torch.log_softmax(logits, -1)[place, before, token]


def score(given: Problem) -> torch.Tensor:
    """∇ log π of each token by the softmax's closed form, onehot - π: float64 [n, 27]."""
    place, before, token = given.where.T
    rows = torch.arange(len(place))
    out = torch.zeros(len(place), LONGEST, TOKENS, TOKENS, dtype=torch.float64)
    out[rows, place, before] = -torch.softmax(given.logits, -1)[place, before]
    out[rows, place, before, token] += 1.0
    return out.flatten(1)


def answer_logprobs(logprobs: torch.Tensor, given: Problem) -> torch.Tensor:
    return torch.zeros(len(given.advantage), dtype=torch.float64).index_add(0, given.answer, logprobs)


def on_policy_gradient(given: Problem) -> torch.Tensor:
    """∇ E_π[A] = Σ π(y) A(y) ∇ log π(y): [27]."""
    probability = answer_logprobs(token_logprobs(given.logits, given.where), given).exp()
    return ((probability * given.advantage)[given.answer, None] * score(given)).sum(0)


def top_probabilities(given: Problem, k: int) -> torch.Tensor:
    """μ of each token's alternatives, 0 where they are not among the k likeliest: [n, 3]."""
    place, before, _ = given.where.T
    probability = torch.softmax(given.sampling, -1)[place, before]
    kept = probability.argsort(1, descending=True)[:, :k]
    return torch.zeros_like(probability).scatter(1, kept, probability.gather(1, kept))


def expected_score(given: Problem, k: int) -> torch.Tensor:
    """Σ_j μ_j ∇ log π(j) = Σ_j μ_j (onehot_j - π) over the k likeliest at each token: [n, 27]."""
    place, before, _ = given.where.T
    top, rows = top_probabilities(given, k), torch.arange(len(place))
    out = torch.zeros(len(place), LONGEST, TOKENS, TOKENS, dtype=torch.float64)
    out[rows, place, before] = top - top.sum(1, keepdim=True) * torch.softmax(given.logits, -1)[place, before]
    return out.flatten(1)


def estimates(given: Problem, algorithm: AlgorithmConfig) -> torch.Tensor:
    """The ascent direction that each answer gives under a correction: [answers, 27]."""
    current = token_logprobs(given.logits, given.where).requires_grad_()
    data, inputs = TokenData(given.behaviour, given.advantage[given.answer], given.answer, given.age), [current]
    k = algorithm.center_scores
    if k:
        place, before, _ = given.where.T
        logprobs = torch.log_softmax(given.logits, -1)[place, before]
        expected = (top_probabilities(given, k) * logprobs).sum(1).requires_grad_()
        data, inputs = data._replace(expected=expected), [current, expected]
    slopes = torch.autograd.grad(token_losses(current, data, algorithm).sum(), inputs)
    directions = [score(given), *([expected_score(given, k)] if k else [])]
    each = -sum(slope[:, None] * direction for slope, direction in zip(slopes, directions, strict=True))
    return torch.zeros(len(given.advantage), 27, dtype=torch.float64).index_add(0, given.answer, each)


def expectation(given: Problem, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [27] and variance [27] of one answer's estimate under the policy that sampled, exactly."""
    each = estimates(given, algorithm)
    probability = answer_logprobs(given.behaviour, given).exp()[:, None]
    mean = (probability * each).sum(0)
    return mean, (probability * (each - mean).square()).sum(0)


def bias_and_noise(algorithm: AlgorithmConfig, age: int, problems: int = 20) -> tuple[float, float]:
    """Averages over `problems` seeds, as parts of the on-policy gradient's norm: ‖E g - g*‖, and the standard deviation
    of the mean of 256 answers."""
    found = []
    for seed in range(problems):
        given = problem(age, seed=seed)
        truth = on_policy_gradient(given)
        mean, variance = expectation(given, algorithm)
        found.append([float((mean - truth).norm() / truth.norm()), float((variance.sum() / 256).sqrt() / truth.norm())])
    bias, noise = np.mean(found, axis=0)
    return float(bias), float(noise)

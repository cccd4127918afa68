"""Aggregation and advantages against oracles that loop in numpy, and the sums that may not depend on the split.
What the loss of a token is: tests/trainer/algorithm."""

import math

import numpy as np
import pytest
import torch

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.advantages import GRPO_EPSILON, grpo
from trainer.algorithm.aggregation import sequence_mean, token_mean
from trainer.algorithm.loss import batch_coefficients, partial_loss
from trainer.algorithm.ratios import LEVELS
from trainer.algorithm.tokens import TokenData

PPO = {"surrogate": "ppo", "treatment": "clip", "ratio_low": 0.8, "ratio_high": 1.28}
WHOLE_ATTEMPTS = {"gate": "k2", "gate_level": "sequence", "gate_bound": 1.0, "veto": 0.05, "negative_mask": 0.3}
ALGORITHMS = [
    AlgorithmConfig(ratio_level=level, aggregation=aggregation, **parts)
    for level in LEVELS
    for parts in (
        {"treatment": "truncate"},
        PPO,
        {"treatment": "mask", "ratio_low": 0.1, "age_power": -0.5, "age_decay": 0.5},
        {"surrogate": "decoupled_ppo"},
        WHOLE_ATTEMPTS,
    )
    for aggregation in ("token_mean", "sequence_mean")
]


def label(algorithm: AlgorithmConfig) -> str:
    parts = (algorithm.surrogate, algorithm.ratio_level, algorithm.treatment, algorithm.gate, algorithm.aggregation)
    return "-".join(parts)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_gradient_does_not_depend_on_the_split_or_the_order(algorithm: AlgorithmConfig, dtype: torch.dtype) -> None:
    """Eight attempts of a linear softmax policy, as 1×8, 2×4, 8×1 and permuted."""
    torch.manual_seed(3)
    lengths = [1, 5, 2, 9, 3, 4, 12, 1]
    attempt = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    n = len(attempt)
    features, target = torch.randn(n, 6, dtype=dtype), torch.randint(0, 10, (n,))
    behaviour = -torch.rand(n, dtype=dtype) * 3 - 1
    advantage = torch.randn(8, dtype=dtype)[attempt]
    age = torch.arange(n) % 5
    coefficients = batch_coefficients(attempt, algorithm)

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 60, dtype=dtype).reshape(6, 10).requires_grad_()
        for members in parts:
            where = torch.cat([torch.nonzero(attempt == member)[:, 0] for member in members])
            current = torch.log_softmax(features[where] @ weight, -1).gather(1, target[where, None])[:, 0]
            data = TokenData(behaviour[where], advantage[where], attempt[where], age[where])
            partial_loss(current, data, coefficients[where], algorithm).backward()
        assert weight.grad is not None
        return weight.grad

    whole = gradient([list(range(8))])
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for parts in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[i] for i in range(8)], [[6, 2], [7, 0, 4], [1, 5, 3]]):
        assert float((gradient(parts) - whole).norm() / whole.norm()) < tolerance


def test_coefficients_count_only_attempts_that_train() -> None:
    attempt = torch.tensor([0, 0, 3])
    assert sequence_mean(attempt).tolist() == [0.25, 0.25, 0.5]
    assert token_mean(attempt).tolist() == pytest.approx([1 / 3] * 3)
    empty = torch.zeros(0, dtype=torch.int64)
    assert sequence_mean(empty).shape == token_mean(empty).shape == (0,)


def test_grpo_equals_the_oracle() -> None:
    generator = np.random.default_rng(1)
    group = generator.permutation(np.repeat(np.arange(6), [8, 8, 2, 3, 1, 8]))
    rewards = np.where(group == 5, 0.1, generator.normal(0, 10, len(group)))
    expected = []
    for r, g in zip(rewards, group, strict=True):
        members = rewards[group == g]
        deviation = math.sqrt(sum((members - members.mean()) ** 2) / len(members))
        expected.append(0.0 if np.ptp(members) == 0 else (r - members.mean()) / (deviation + GRPO_EPSILON))
    assert grpo(torch.from_numpy(rewards), torch.from_numpy(group)).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9 + 0.1, -7e-12])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_a_group_without_variance_has_advantage_exactly_zero(value: float, size: int) -> None:
    rewards, group = torch.full((size,), value, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    assert grpo(rewards, group).tolist() == [0.0] * size


def test_grpo_of_nothing_is_nothing() -> None:
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)

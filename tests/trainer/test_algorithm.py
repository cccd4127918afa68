"""The sums that may not depend on the split. What the parts are: tests/trainer/algorithm."""

import pytest
import torch

from async_rl.algorithm_config import AlgorithmConfig
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
        {"surrogate": "decoupled_ppo", "proximal": "log_linear", "clip_low": 0.8, "clip_high": 1.2},
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
    coefficients = batch_coefficients(attempt, attempt // 2, algorithm)

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

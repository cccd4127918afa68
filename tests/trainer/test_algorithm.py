"""Each part of the loss against an independent float64 numpy oracle that loops over tokens."""

import math

import numpy as np
import pytest
import torch

from async_rl.config import AlgorithmConfig
from trainer.algorithm.advantages import GRPO_EPSILON, grpo
from trainer.algorithm.aggregation import sequence_mean, token_mean
from trainer.algorithm.loss import TokenData, batch_coefficients, partial_loss, ratio_metrics, token_losses
from trainer.algorithm.ratios import importance_ratio

LEVELS = ("token", "sequence")
PG = [
    AlgorithmConfig(ratio_level=level, treatment=treatment, ratio_low=0.5, ratio_high=2.0, aggregation=aggregation)
    for level in LEVELS
    for treatment in ("truncate", "clip", "uncorrected")
    for aggregation in ("token_mean", "sequence_mean")
]
PPO = [
    AlgorithmConfig(
        ratio_level=level,
        treatment="clip",
        ratio_low=0.8,
        ratio_high=1.28,
        surrogate="ppo",
        aggregation=aggregation,
    )
    for level in LEVELS
    for aggregation in ("token_mean", "sequence_mean")
]


def label(algorithm: AlgorithmConfig) -> str:
    return f"{algorithm.surrogate}-{algorithm.ratio_level}-{algorithm.treatment}-{algorithm.aggregation}"


def tokens_of(case: str) -> tuple[torch.Tensor, TokenData]:
    """Current log-probabilities and the rest of a batch: ordinary, or hostile in one way."""
    generator = np.random.default_rng(7)
    attempt = {"empty": [], "length_one": [0], "lone_tokens": [0, 1, 2]}.get(case, [0, 0, 0, 1, 1, 2, 2, 2, 2, 4])
    n = len(attempt)
    age = generator.integers(0, 5, n)
    behaviour = -generator.exponential(1.0, n)
    current = np.minimum(behaviour + generator.normal(0, 0.4, n), 0.0)
    advantage = generator.normal(0, 1, 5)[attempt] if n else np.zeros(0)
    if case == "gap_200":
        current[0] = behaviour[0] - 200.0
        behaviour[5] = current[5] - 200.0
    if case == "one_sided":
        advantage = np.abs(advantage)
    if case == "all_negative":
        advantage = -np.abs(advantage) * 50
    data = TokenData(
        torch.from_numpy(behaviour),
        torch.from_numpy(advantage),
        torch.tensor(attempt, dtype=torch.int64),
        torch.tensor(age, dtype=torch.int64),
    )
    return torch.from_numpy(current), data


CASES = ("ordinary", "empty", "length_one", "lone_tokens", "gap_200", "one_sided", "all_negative")


def oracle_ratios(policy: np.ndarray, data: TokenData, level: str, constant: np.ndarray | None = None) -> list[float]:
    """With `constant`, only the token's own log-probability moves away from it."""
    constant = policy if constant is None else constant
    behaviour, attempt = data.behaviour.numpy(), data.attempt.numpy()
    out = []
    for t in range(len(policy)):
        members = [t] if level == "token" else [u for u in range(len(policy)) if attempt[u] == attempt[t]]
        others = math.fsum(constant[u] - behaviour[u] for u in members)
        log_ratio = others + (policy[t] - constant[t])
        out.append(math.exp(max(-20.0, min(20.0, log_ratio))))
    return out


def oracle_weight(ratio: float, algorithm: AlgorithmConfig) -> float:
    if algorithm.treatment == "uncorrected":
        return 1.0
    if algorithm.treatment == "truncate":
        return min(ratio, algorithm.ratio_high)
    return max(algorithm.ratio_low, min(ratio, algorithm.ratio_high))


def oracle_coefficients(attempt: np.ndarray, aggregation: str) -> list[float]:
    if aggregation == "token_mean":
        return [1.0 / len(attempt) for _ in attempt]
    present = sorted(set(attempt.tolist()))
    return [1.0 / (len(present) * sum(attempt == a)) for a in attempt]


def oracle_loss(current: np.ndarray, constant: np.ndarray, data: TokenData, algorithm: AlgorithmConfig) -> float:
    """The loss with the stop-gradient part taken at `constant`, so that numeric differences see the true gradient."""
    coefficients = oracle_coefficients(data.attempt.numpy(), algorithm.aggregation)
    moving = oracle_ratios(current, data, algorithm.ratio_level, constant)
    fixed = oracle_ratios(constant, data, algorithm.ratio_level)
    total = 0.0
    for t, advantage in enumerate(data.advantage.tolist()):
        if algorithm.surrogate == "ppo":
            clipped = max(algorithm.ratio_low, min(moving[t], algorithm.ratio_high))
            loss = -min(moving[t] * advantage, clipped * advantage)
        else:
            loss = -oracle_weight(fixed[t], algorithm) * advantage * current[t]
        total += coefficients[t] * loss
    return total


def loss_and_gradient(
    current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = current.clone().requires_grad_()
    loss = partial_loss(leaf, data, batch_coefficients(data.attempt, algorithm), algorithm)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algorithm", PG + PPO, ids=label)
def test_loss_and_gradient_equal_the_oracle(algorithm: AlgorithmConfig, case: str) -> None:
    current, data = tokens_of(case)
    loss, gradient = loss_and_gradient(current, data, algorithm)
    x = current.numpy()
    assert float(loss) == pytest.approx(oracle_loss(x, x, data, algorithm), rel=1e-9, abs=1e-12)
    step = 1e-6
    for t in range(len(x)):
        up, down = x.copy(), x.copy()
        up[t] += step
        down[t] -= step
        numeric = (oracle_loss(up, x, data, algorithm) - oracle_loss(down, x, data, algorithm)) / (2 * step)
        # A loss of size e^20 costs the difference quotient its last digits.
        assert float(gradient[t]) == pytest.approx(numeric, rel=1e-5, abs=1e-7 + 1e-9 * abs(float(loss)))


@pytest.mark.parametrize("algorithm", PG + PPO, ids=label)
def test_a_gap_of_200_is_finite_in_float32(algorithm: AlgorithmConfig) -> None:
    current, data = tokens_of("gap_200")
    single = TokenData(data.behaviour.float(), data.advantage.float(), data.attempt, data.age)
    loss, gradient = loss_and_gradient(current.float(), single, algorithm)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in ratio_metrics(current.float(), single, algorithm).values())


def test_ppo_lets_no_gradient_through_what_the_clip_decides() -> None:
    algorithm = PPO[0]
    data = TokenData(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]), torch.tensor([0, 1]), torch.tensor([0, 3]))
    far = torch.tensor([-0.2, -1.8])  # ratios 2.2 with A > 0 and 0.45 with A < 0: both are past the bound that counts
    assert loss_and_gradient(far, data, algorithm)[1].tolist() == [0.0, 0.0]
    back = torch.tensor([-1.8, -0.2])  # the same ratios the other way round: PPO still pulls these back
    assert (loss_and_gradient(back, data, algorithm)[1] != 0).all()


@pytest.mark.parametrize(
    "algorithm", [algorithm for algorithm in PG if algorithm.treatment != "uncorrected"], ids=label
)
def test_importance_weights_carry_no_gradient(algorithm: AlgorithmConfig) -> None:
    current, data = tokens_of("ordinary")
    leaf = current.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(token_losses(leaf, data, algorithm).sum(), leaf)
    ratio = oracle_ratios(current.numpy(), data, algorithm.ratio_level)
    expected = [-oracle_weight(r, algorithm) * a for r, a in zip(ratio, data.advantage.tolist(), strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_ratios_equal_the_oracle(level: str, case: str) -> None:
    current, data = tokens_of(case)
    ratio = importance_ratio(current, data.behaviour, data.attempt, level)  # type: ignore[arg-type]
    assert ratio.tolist() == pytest.approx(oracle_ratios(current.numpy(), data, level), rel=1e-12)


@pytest.mark.parametrize("algorithm", PG + PPO, ids=label)
@pytest.mark.parametrize("case", [case for case in CASES if case != "empty"])
def test_metrics_equal_the_oracle(algorithm: AlgorithmConfig, case: str) -> None:
    current, data = tokens_of(case)
    metrics = ratio_metrics(current, data, algorithm)
    x, n = current.numpy(), len(current)
    ratio = oracle_ratios(x, data, algorithm.ratio_level)
    weight = [oracle_weight(r, algorithm) for r in ratio]
    low = 0.0 if algorithm.treatment == "truncate" else algorithm.ratio_low
    gap = (x - data.behaviour.numpy()).tolist()
    bounded = [max(-20.0, min(20.0, g)) for g in gap]
    assert metrics == pytest.approx(
        {
            "ratio_mean": math.fsum(ratio) / n,
            "ratio_max": max(ratio),
            "kept_fraction": sum(low <= r <= algorithm.ratio_high for r in ratio) / n,
            "ess": math.fsum(weight) ** 2 / (n * math.fsum(w * w for w in weight)),
            "k3": math.fsum(math.exp(b) - 1 - b for b in bounded) / n,
            "mismatch_mean": math.fsum(abs(g) for g in gap) / n,
            "mismatch_max": max(abs(g) for g in gap),
            "entropy_proxy": -math.fsum(x) / n,
            "tokens": n,
        },
        rel=1e-9,
        abs=1e-12,
    )


def test_an_empty_batch_raises_no_alarm() -> None:
    current, data = tokens_of("empty")
    metrics = ratio_metrics(current, data, AlgorithmConfig())
    assert metrics["kept_fraction"] == metrics["ess"] == 1.0
    assert metrics["tokens"] == metrics["mismatch_max"] == 0.0


@pytest.mark.parametrize("algorithm", PG + PPO, ids=label)
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
    coefficients = batch_coefficients(attempt, algorithm)

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 60, dtype=dtype).reshape(6, 10).requires_grad_()
        for members in parts:
            where = torch.cat([torch.nonzero(attempt == member)[:, 0] for member in members])
            current = torch.log_softmax(features[where] @ weight, -1).gather(1, target[where, None])[:, 0]
            data = TokenData(behaviour[where], advantage[where], attempt[where], attempt[where])
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

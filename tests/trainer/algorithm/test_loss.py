"""Every part of the token loss, alone and composed, against the oracle of tests/support/loss_oracle.py."""

from __future__ import annotations

import math
from typing import Any

import loss_oracle as oracle
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_tensors import data_of, tensors_of

from async_rl.algorithm_config import AlgorithmConfig, check_algorithm
from async_rl.schema import ConfigError
from trainer.algorithm.keep import DIVERGENCES, binary_kl
from trainer.algorithm.loss import token_losses
from trainer.algorithm.ratios import LEVELS, importance_ratio

BOUNDS = {"ratio_low": 0.6, "ratio_high": 1.6}
PPO = {"surrogate": "ppo", "treatment": "clip", "ratio_low": 0.8, "ratio_high": 1.28}
PARTS: list[dict[str, Any]] = [
    *({"ratio_level": level, "treatment": treatment, **BOUNDS}
      for level in LEVELS for treatment in ("truncate", "mask", "clip", "uncorrected")),
    *({"ratio_level": level, **PPO} for level in LEVELS),
    {"ratio_level": "token", **PPO, "dual_clip": 3.0},
    *({"ratio_level": level, **PPO, "age_power": power} for level in LEVELS for power in (-0.5, 0.5)),
    {"treatment": "mask", **BOUNDS, "age_power": -1.0},
    *({"surrogate": "topr", "ratio_level": level, "treatment": treatment, "ratio_high": 1.0}
      for level in LEVELS for treatment in ("truncate", "mask")),
    *({"surrogate": "decoupled_ppo", "ratio_level": level, "treatment": treatment, "ratio_high": 1.3,
       "proximal": "log_linear", "clip_low": 0.8, "clip_high": 1.2}
      for level in LEVELS for treatment in ("truncate", "mask", "uncorrected")),
    {"surrogate": "decoupled_ppo", "ratio_level": "token", "clip_low": 0.9, "clip_high": 1.05, "dual_clip": 1.5,
     "proximal": "log_linear"},
    *({"gate": kind, "gate_level": level, "gate_bound": bound}
      for kind in DIVERGENCES for level in ("token", "sequence") for bound in (0.003, 0.1)),
    *({"gate": kind, "gate_side": "away", "gate_bound": 0.05} for kind in DIVERGENCES),
    {"veto": 1e-4}, {"veto": 0.6}, {"negative_mask": 0.05}, {"age_decay": 0.5}, {"age_decay": 2.0},
    {"age_decay": 0.5, "age_decay_of": "failures"},
    {"surrogate": "topr", "ratio_high": 1.0, "age_decay": 0.5, "age_decay_of": "failures"},
    {"ratio_level": "token", "treatment": "mask", **BOUNDS, "gate": "k3", "gate_bound": 0.2, "veto": 1e-3,
     "negative_mask": 0.1, "age_decay": 1.0},
    {**PPO, "gate": "tv", "gate_bound": 0.1, "veto": 1e-3, "negative_mask": 0.1, "age_decay": 1.0, "age_power": -0.5},
]  # fmt: skip


def label(parts: dict[str, Any]) -> str:
    return "-".join(f"{value}" if isinstance(value, str) else f"{key}{value}" for key, value in parts.items())


def made(parts: dict[str, Any]) -> AlgorithmConfig:
    algorithm = AlgorithmConfig(**parts)
    check_algorithm(algorithm)
    return algorithm


@pytest.mark.parametrize("name", oracle.CASES)
@pytest.mark.parametrize("parts", PARTS, ids=label)
def test_loss_and_gradient_of_every_part_equal_the_oracle(parts: dict[str, Any], name: str) -> None:
    algorithm = made(parts)
    values, tokens = oracle.case(name)
    current, data = tensors_of(name)
    losses = token_losses(current.requires_grad_(), data, algorithm)
    (gradient,) = torch.autograd.grad(losses.sum(), current)
    assert losses.shape == current.shape
    for t in range(len(values)):
        expected = oracle.token_loss(t, values, values, tokens, algorithm)
        assert float(losses[t].detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        # A loss of size e^20 costs the difference quotient its last digits.
        slope = oracle.gradient(t, values, tokens, algorithm)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-5, abs=1e-7 + 1e-9 * abs(expected))


@pytest.mark.parametrize("name", ["gap_200", "certain", "all_negative"])
@pytest.mark.parametrize("parts", PARTS, ids=label)
def test_hostile_tokens_are_finite_in_float32(parts: dict[str, Any], name: str) -> None:
    current, data = tensors_of(name, torch.float32)
    losses = token_losses(current.requires_grad_(), data, made(parts))
    (gradient,) = torch.autograd.grad(losses.sum(), current)
    assert losses.dtype == torch.float32
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parts", PARTS, ids=label)
def test_a_token_that_the_trainer_holds_to_be_impossible_has_no_gradient_and_spoils_no_other(
    parts: dict[str, Any], dtype: torch.dtype
) -> None:
    current, data = tensors_of("ordinary", dtype)
    current[[0, 5]] = -math.inf
    losses = token_losses(current.requires_grad_(), data, made(parts))
    (gradient,) = torch.autograd.grad(losses.sum(), current)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()
    assert gradient[[0, 5]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("parts", PARTS, ids=label)
def test_a_log_probability_that_is_no_number_is_not_hidden(parts: dict[str, Any]) -> None:
    """The step that it belongs to must fail (trainer.torch_backend); no gate may turn it into a quiet zero."""
    current, data = tensors_of("ordinary")
    current[2] = math.nan
    assert not torch.isfinite(token_losses(current, data, made(parts)).sum())


@pytest.mark.parametrize("parts", [parts for parts in PARTS if parts.get("surrogate", "topr") == "topr"], ids=label)
def test_weights_carry_no_gradient(parts: dict[str, Any]) -> None:
    algorithm = made(parts)
    values, tokens = oracle.case("ordinary")
    current, data = tensors_of("ordinary")
    (gradient,) = torch.autograd.grad(token_losses(current.requires_grad_(), data, algorithm).sum(), current)
    for t, advantage in enumerate(tokens.advantage):
        plain = algorithm.surrogate == "topr" and advantage > 0
        weight = 1.0 if plain else oracle.weight(t, values, tokens, algorithm)
        expected = -oracle.factor(t, values, tokens, algorithm) * weight * advantage
        assert float(gradient[t]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", oracle.CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_decoupled_ppo_of_a_later_step_equals_the_oracle(level: str, name: str) -> None:
    """The proximal policy is one that the batch's earlier steps have left."""
    algorithm = AlgorithmConfig(
        surrogate="decoupled_ppo", ratio_level=level, ratio_high=1.3, clip_low=0.9, clip_high=1.1, dual_clip=2.0
    )
    values, tokens = oracle.case(name)
    tokens = tokens._replace(proximal=[min(value + 0.15 * (-1) ** t, 0.0) for t, value in enumerate(values)])
    current = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    losses = token_losses(current, data_of(tokens), algorithm)
    (gradient,) = torch.autograd.grad(losses.sum(), current)
    for t in range(len(values)):
        assert float(losses[t].detach()) == pytest.approx(oracle.token_loss(t, values, values, tokens, algorithm))
        slope = oracle.gradient(t, values, tokens, algorithm)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_ppo_lets_no_gradient_through_what_the_clip_decides() -> None:
    algorithm = made({**PPO, "ratio_level": "token"})
    tokens = oracle.Tokens([-1.0, -1.0], [1.0, -1.0], [0, 1], [0, 0])

    def gradient(values: list[float], algorithm: AlgorithmConfig) -> list[float]:
        current = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(token_losses(current, data_of(tokens), algorithm).sum(), current)
        return list(found.tolist())

    far = [-0.2, -1.8]  # ratios 2.2 with A > 0 and 0.45 with A < 0: both are past the bound that counts
    assert gradient(far, algorithm) == [0.0, 0.0]
    back = [-1.8, -0.2]  # the same ratios the other way round: PPO still pulls these back
    assert all(gradient(back, algorithm))
    assert gradient([-1.0, 0.5], made({**PPO, "ratio_level": "token", "dual_clip": 2.0}))[1] == 0  # unless it is e^1.5


def test_an_old_token_is_clipped_earlier_below_power_0_and_later_above() -> None:
    """Ratio 1.2 is inside 1.28; at age 3 and power ∓½ the bound is 1.28^(1/2) = 1.13, or 1.28² = 1.64."""
    for power, ratio, moves in ((-0.5, 1.2, False), (0.0, 1.2, True), (0.5, 1.5, True), (0.0, 1.5, False)):
        algorithm = made({**PPO, "ratio_level": "token", "age_power": power})
        current = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        data = data_of(oracle.Tokens([0.0], [1.0], [0], [3]))
        (gradient,) = torch.autograd.grad(token_losses(current, data, algorithm).sum(), current)
        assert bool(gradient[0] != 0) == moves


@pytest.mark.parametrize("name", oracle.CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_ratios_equal_the_oracle(level: Any, name: str) -> None:
    values, tokens = oracle.case(name)
    current, data = tensors_of(name)
    expected = [oracle.ratio(t, values, values, tokens, level) for t in range(len(values))]
    assert importance_ratio(current, data, level).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_run_of_one_version_ends_where_the_version_changes() -> None:
    tokens = oracle.Tokens([-1.0] * 5, [1.0] * 5, [0, 0, 0, 1, 1], [2, 2, 1, 1, 1])
    current = torch.tensor([-0.9, -1.1, -0.7, -1.2, -1.3], dtype=torch.float64)
    expected = [math.exp(x) for x in (0.0, 0.0, 0.3, -0.5, -0.5)]
    assert importance_ratio(current, data_of(tokens), "segment").tolist() == pytest.approx(expected, rel=1e-12)


# --- what must hold of any tokens ------------------------------------------------------------------------------------

logprob = st.floats(-30, 0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, Any]:
    n = draw(st.integers(1, 12))

    def listed(each: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(each, min_size=n, max_size=n))

    tokens = oracle.Tokens(
        listed(logprob), listed(st.floats(-5, 5)), sorted(listed(st.integers(0, 3))), listed(st.integers(0, 16))
    )
    return torch.tensor(listed(logprob), dtype=torch.float64), data_of(tokens)


@settings(max_examples=60)
@given(batches(), st.sampled_from(PARTS))
def test_any_tokens_give_a_finite_loss_and_gradient_per_token(batch: Any, parts: dict[str, Any]) -> None:
    current, data = batch
    losses = token_losses(current.requires_grad_(), data, made(parts))
    (gradient,) = torch.autograd.grad(losses.sum(), current)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()
    assert not gradient[data.advantage == 0].any()


@settings(max_examples=60)
@given(batches(), st.sampled_from(PARTS))
def test_with_identical_policies_every_part_is_the_plain_policy_gradient(batch: Any, parts: dict[str, Any]) -> None:
    """Ratio 1 everywhere: whatever corrects has nothing to correct; only the weight by age is left."""
    algorithm = made(parts)
    _, data = batch
    current = data.behaviour.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(token_losses(current, data, algorithm).sum(), current)
    aged = (data.advantage < 0) | (algorithm.age_decay_of == "all")
    expected = -data.advantage / (1.0 + data.age.double() * aged) ** algorithm.age_decay
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-15)


SURROGATES = ("policy_gradient", "ppo", "topr", "decoupled_ppo")
TREATMENTS = ("truncate", "mask", "clip", "uncorrected")


@settings(max_examples=100)
@given(
    st.sampled_from(SURROGATES), st.sampled_from(TREATMENTS), st.sampled_from(list(LEVELS)),
    st.sampled_from(["recomputed", "log_linear"]), st.floats(-4, 4), st.floats(-5, 5), st.integers(0, 16),
)  # fmt: skip
def test_no_accepted_composition_counts_a_ratio_twice(
    surrogate: Any, treatment: Any, level: Any, proximal: Any, log_ratio: float, advantage: float, age: int
) -> None:
    """Inside the bounds the gradient of an answer of one token is that of ρ · A: the ratio once, and not at all only
    where somebody asked for that by name."""
    algorithm = AlgorithmConfig(
        surrogate=surrogate, treatment=treatment, ratio_level=level, ratio_high=1e9, clip_low=0.0, clip_high=1e9,
        proximal=proximal if surrogate == "decoupled_ppo" else "recomputed",
    )  # fmt: skip
    if surrogate != "decoupled_ppo":
        algorithm = msgspec.structs.replace(algorithm, clip_high=0.0)
    try:
        check_algorithm(algorithm, updates_per_batch=4)
    except ConfigError:
        assert (surrogate == "ppo") == (treatment != "clip") or treatment == "uncorrected"
        return
    current = torch.tensor([-5.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    data = data_of(oracle.Tokens([-5.0], [advantage], [0], [age]))
    (gradient,) = torch.autograd.grad(token_losses(current, data, algorithm).sum(), current)
    power = 1.0
    if treatment == "uncorrected":
        step = surrogate == "decoupled_ppo" and proximal == "log_linear"
        power = 1 / (1 + age) if step else 0.0  # what the step itself has to bound is not a weight
    if surrogate == "topr" and advantage > 0:
        power = 0.0
    assert float(gradient[0]) == pytest.approx(-advantage * math.exp(log_ratio) ** power, rel=1e-9, abs=1e-12)


@given(logprob, logprob)
def test_divergences_are_never_negative_and_zero_between_equals(log_p: float, log_q: float) -> None:
    p, q = torch.tensor([log_p], dtype=torch.float64), torch.tensor([log_q], dtype=torch.float64)
    for kind, divergence in DIVERGENCES.items():
        assert float(divergence(p, q)[0]) >= -1e-12, kind
        assert float(divergence(p, p)[0]) == 0.0, kind


@given(st.lists(st.floats(-4, 4), min_size=3, max_size=3), st.lists(st.floats(-4, 4), min_size=3, max_size=3))
def test_binary_kl_is_at_most_the_kl_of_the_whole_distributions(left: list[float], right: list[float]) -> None:
    p, q = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), 0) for x in (left, right))
    assert (binary_kl(p, q) <= (q.exp() * (q - p)).sum() + 1e-12).all()

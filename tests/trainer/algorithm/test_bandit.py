"""Exact expectations on a policy whose answers can all be listed (docs/algorithm/bandit.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.loss import partial_loss
from trainer.algorithm.ratios import LEVELS
from trainer.algorithm.tokens import TokenData

FILE = Path(__file__).parents[3] / "docs" / "algorithm" / "bandit.py"
spec = importlib.util.spec_from_file_location("bandit", FILE)
assert spec
assert spec.loader
bandit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bandit)

FREE = {"ratio_low": 0.0, "ratio_high": 1e8}
WEIGHT = {"treatment": "truncate", **FREE}
PPO = {"surrogate": "ppo", "treatment": "clip", **FREE}
DECOUPLED = {"surrogate": "decoupled_ppo", "proximal": "log_linear", **WEIGHT, "clip_low": 0.0, "clip_high": 1e8}
WHOLE_ANSWERS: list[dict[str, Any]] = [{"ratio_level": "sequence", **parts} for parts in (WEIGHT, PPO)]
SINGLE_TOKENS: list[dict[str, Any]] = [
    {"ratio_level": level, **parts} for level in LEVELS for parts in (WEIGHT, PPO)
] + [{"ratio_level": "token", **DECOUPLED}]


def label(parts: dict[str, Any]) -> str:
    return f"{parts.get('surrogate', 'policy_gradient')}-{parts['ratio_level']}"


def test_the_listed_answers_are_all_there_are() -> None:
    given = bandit.problem(4)
    current = bandit.token_logprobs(given.logits, given.where)
    assert len(given.advantage) == 1 + 2 + 12
    for logprobs in (current, given.behaviour):
        assert float(bandit.answer_logprobs(logprobs, given).exp().sum()) == pytest.approx(1, abs=1e-12)


def test_the_on_policy_gradient_is_that_of_the_expected_advantage() -> None:
    given = bandit.problem(4)
    logits = given.logits.clone().requires_grad_()
    probability = bandit.answer_logprobs(bandit.token_logprobs(logits, given.where), given).exp()
    (gradient,) = torch.autograd.grad((probability * given.advantage).sum(), logits)
    assert torch.allclose(bandit.on_policy_gradient(given), gradient.flatten(), atol=1e-14)


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("age", [0, 1, 4, 16])
@pytest.mark.parametrize("parts", WHOLE_ANSWERS, ids=label)
def test_the_unbounded_ratio_of_the_whole_answer_is_unbiased(parts: Any, age: int, one_sided: bool) -> None:
    given = bandit.problem(age, one_sided=one_sided)
    mean, _ = bandit.expectation(given, AlgorithmConfig(**parts))
    assert torch.allclose(mean, bandit.on_policy_gradient(given), rtol=0, atol=1e-13)


@pytest.mark.parametrize("age", [1, 16])
@pytest.mark.parametrize("parts", SINGLE_TOKENS, ids=label)
def test_of_answers_of_one_token_every_unbounded_ratio_is_unbiased(parts: Any, age: int) -> None:
    given = bandit.problem(age, longest=1)
    mean, _ = bandit.expectation(given, AlgorithmConfig(**parts))
    assert torch.allclose(mean, bandit.on_policy_gradient(given), rtol=0, atol=1e-13)


@pytest.mark.parametrize("parts", WHOLE_ANSWERS, ids=label)
def test_sampled_answers_give_the_on_policy_gradient_within_the_standard_error(parts: Any) -> None:
    """20,000 answers through the loss as the trainer computes it, in one go."""
    n, algorithm = 20_000, AlgorithmConfig(**parts)
    given = bandit.problem(4)
    probability = bandit.answer_logprobs(given.behaviour, given).exp()
    drawn = torch.multinomial(probability, n, replacement=True, generator=torch.Generator().manual_seed(5))
    tokens = [torch.nonzero(given.answer == each)[:, 0] for each in range(len(given.advantage))]
    which = torch.cat([tokens[each] for each in drawn.tolist()])
    attempt = torch.repeat_interleave(torch.arange(n), torch.tensor([len(tokens[each]) for each in drawn.tolist()]))
    logits = given.logits.clone().requires_grad_()
    current = bandit.token_logprobs(logits, given.where[which])
    data = TokenData(given.behaviour[which], given.advantage[given.answer[which]], attempt, given.age[which])
    loss = partial_loss(current, data, torch.full((len(which),), 1 / n, dtype=torch.float64), algorithm)
    (gradient,) = torch.autograd.grad(loss, logits)
    error = (bandit.expectation(given, algorithm)[1] / n).sqrt()
    off = (-gradient.flatten() - bandit.on_policy_gradient(given)).abs()
    assert (off <= 4 * error + 1e-12).all()
    assert float((off / error.clamp(min=1e-12)).square()[error > 0].mean()) == pytest.approx(1, abs=0.8)


@pytest.mark.parametrize(
    "parts",
    [
        {"treatment": "uncorrected"},
        {"ratio_level": "sequence", "ratio_high": 1.0},
        {"ratio_level": "token", **WEIGHT},
        {"ratio_level": "geometric", **WEIGHT},
        {"ratio_level": "segment", **WEIGHT},
    ],
    ids=str,
)
def test_what_bounds_or_leaves_out_is_biased_and_the_measure_sees_it(parts: Any) -> None:
    bias, _ = bandit.bias_and_noise(AlgorithmConfig(**parts), age=16, problems=3)
    assert bias > 0.05


def centred(k: int) -> AlgorithmConfig:
    return AlgorithmConfig(treatment="uncorrected", center_scores=k)


@pytest.mark.parametrize("one_sided", [False, True])
def test_between_equal_policies_centred_scores_give_the_on_policy_gradient(one_sided: bool) -> None:
    given = bandit.problem(0, one_sided=one_sided)
    mean, _ = bandit.expectation(given, centred(bandit.TOKENS))
    assert torch.allclose(mean, bandit.on_policy_gradient(given), rtol=0, atol=1e-13)


def test_what_centring_takes_away_is_what_a_constant_advantage_gives() -> None:
    """From old data the mean of uncorrected scores is not zero, of centred ones it is, but for what k leaves out."""
    given = bandit.problem(16)
    given = given._replace(advantage=torch.ones_like(given.advantage))
    assert float(bandit.expectation(given, AlgorithmConfig(treatment="uncorrected"))[0].norm()) > 0.1
    assert float(bandit.expectation(given, centred(bandit.TOKENS))[0].norm()) < 1e-14
    assert float(bandit.expectation(given, centred(bandit.TOKENS - 1))[0].norm()) > 0.1


def test_the_closed_form_of_the_expected_score_is_its_gradient() -> None:
    given = bandit.problem(4)
    logits = given.logits.clone().requires_grad_()
    place, before, _ = given.where.T
    expected = (bandit.top_probabilities(given, 2) * torch.log_softmax(logits, -1)[place, before]).sum(1)
    rows = [torch.autograd.grad(each, logits, retain_graph=True)[0].flatten() for each in expected]
    assert torch.allclose(torch.stack(rows), bandit.expected_score(given, 2), atol=1e-14)

"""Presets against the papers' own formulas for a whole batch: written over answers, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import config_from_table
from trainer.algorithm.loss import batch_coefficients, partial_loss
from trainer.algorithm.tokens import TokenData

LENGTHS = (1, 4, 9, 2, 6, 3)
GROUPS = (0, 0, 0, 1, 1, 1)
Answers = list[tuple[torch.Tensor, torch.Tensor, float]]  # log π, log μ, A of each answer


def batch(gap: float) -> tuple[torch.Tensor, TokenData, torch.Tensor]:
    generator = np.random.default_rng(11)
    n = sum(LENGTHS)
    behaviour = torch.from_numpy(-generator.exponential(1.0, n) - 0.3)
    current = torch.clamp(behaviour + torch.from_numpy(generator.normal(0, gap, n)), max=0.0)
    advantage = torch.from_numpy(generator.normal(0, 1, len(LENGTHS)))
    attempt = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    data = TokenData(behaviour, advantage[attempt], attempt, torch.from_numpy(generator.integers(0, 5, n)))
    return current, data, torch.tensor(GROUPS)[attempt]


def answers(current: torch.Tensor, data: TokenData) -> Answers:
    parts = zip(current.split(LENGTHS), data.behaviour.split(LENGTHS), data.advantage.split(LENGTHS), strict=True)
    return [(pi, mu, float(a[0])) for pi, mu, a in parts]


def preset(name: str) -> AlgorithmConfig:
    table: dict[str, Any] = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort"}}
    config = config_from_table(table | {"algorithm": {"preset": name}}, "test")
    length = config.inference.max_new_tokens if name == "dr_grpo" else 0
    return msgspec.structs.replace(config.algorithm, aggregation_length=length)


def clipped(ratio: torch.Tensor, a: float, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def token_mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(values).sum() / sum(LENGTHS)


def sequence_mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.mean() for each in values]).mean()


def grpo(batch: Answers) -> torch.Tensor:
    return -sequence_mean([clipped((pi - mu).exp(), a, 0.8, 1.2) for pi, mu, a in batch])


def dapo(batch: Answers) -> torch.Tensor:
    return -token_mean([clipped((pi - mu).exp(), a, 0.8, 1.28) for pi, mu, a in batch])


def gspo(batch: Answers) -> torch.Tensor:
    """The gradient goes through the answer's whole ratio here."""
    return -torch.stack([clipped((pi - mu).mean().exp(), a, 1 - 3e-4, 1 + 4e-4) for pi, mu, a in batch]).mean()


def cispo(batch: Answers) -> torch.Tensor:
    return -token_mean([(pi - mu).exp().clamp(max=5).detach() * a * pi for pi, mu, a in batch])


def tis(batch: Answers) -> torch.Tensor:
    return -token_mean([(pi - mu).exp().clamp(max=2).detach() * a * pi for pi, mu, a in batch])


def icepop(batch: Answers) -> torch.Tensor:
    def popped(pi: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
        ratio = (pi - mu).exp().detach()
        return ratio * ((ratio >= 0.5) & (ratio <= 5))

    return -token_mean([popped(pi, mu) * a * pi for pi, mu, a in batch])


def topr(batch: Answers) -> torch.Tensor:
    return -sequence_mean(
        [(1.0 if a > 0 else (pi - mu).sum().exp().clamp(max=1).detach()) * a * pi for pi, mu, a in batch]
    )


def dppo(batch: Answers) -> torch.Tensor:
    """r · A, masked, as sg(r) · A · log π, which has the same gradient; r at most 5 here."""

    def masked(pi: torch.Tensor, mu: torch.Tensor, a: float) -> torch.Tensor:
        ratio, moved = (pi - mu).exp().detach(), (pi.exp() - mu.exp()).abs() > 0.2
        away = ratio > 1 if a > 0 else ratio < 1
        return ratio.clamp(max=5) * a * pi * ~(moved & away)

    return -token_mean([masked(pi, mu, a) for pi, mu, a in batch])


def flash_reinforce(batch: Answers) -> torch.Tensor:
    def gated(pi: torch.Tensor, mu: torch.Tensor) -> float:
        p, q = pi.detach().exp(), mu.exp()
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        return float(kl.mean() <= 3e-3)

    return -sequence_mean([gated(pi, mu) * (pi - mu).exp().detach() * a * pi for pi, mu, a in batch])


def dr_grpo(batch: Answers) -> torch.Tensor:
    total = torch.cat([clipped((pi - mu).exp(), a, 0.8, 1.2) for pi, mu, a in batch]).sum()
    return -total / (len(batch) * 64)


def scale_rl(batch: Answers) -> torch.Tensor:
    losses = [(pi - mu).exp().clamp(max=5).detach() * a * pi for pi, mu, a in batch]
    prompts = [torch.cat([each for each, group in zip(losses, GROUPS, strict=True) if group == g]) for g in (0, 1)]
    return -torch.stack([each.mean() for each in prompts]).mean()


def deepseek_v32(batch: Answers) -> torch.Tensor:
    def kept(pi: torch.Tensor, mu: torch.Tensor, a: float) -> float:
        return 0.0 if a < 0 and float((mu - pi).detach().mean()) > 0.5 else 1.0

    return -sequence_mean([kept(pi, mu, a) * clipped((pi - mu).exp(), a, 0.8, 1.2) for pi, mu, a in batch])


METHODS: list[Callable[[Answers], torch.Tensor]] = [
    grpo, dapo, gspo, cispo, tis, icepop, topr, dppo, flash_reinforce, dr_grpo, scale_rl, deepseek_v32,
]  # fmt: skip


@pytest.mark.parametrize("gap", [2e-4, 0.05, 0.3, 2.0])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_presets_gradient_is_that_of_the_papers_loss(method: Callable[[Answers], torch.Tensor], gap: float) -> None:
    current, data, group = batch(gap)
    algorithm = preset(method.__name__)
    leaf = current.clone().requires_grad_()
    ours = partial_loss(leaf, data, batch_coefficients(data.attempt, group, algorithm), algorithm)
    (gradient,) = torch.autograd.grad(ours, leaf)
    paper = current.clone().requires_grad_()
    (expected,) = torch.autograd.grad(method(answers(paper, data)), paper)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)

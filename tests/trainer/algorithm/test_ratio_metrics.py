"""The numbers about a batch's ratios against the oracle in plain floats."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import loss_oracle as oracle
import pytest
import torch
from loss_tensors import data_of, tensors_of

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.metrics import PERFECT, effective_share, ratio_metrics
from trainer.algorithm.ratios import LEVELS

PARTS: list[dict[str, Any]] = [
    *({"ratio_level": level, "treatment": treatment, "ratio_low": 0.6, "ratio_high": 1.6}
      for level in LEVELS for treatment in ("truncate", "mask", "uncorrected")),
    {"ratio_level": "token", "surrogate": "ppo", "treatment": "clip", "ratio_low": 0.8, "ratio_high": 1.28},
    {"ratio_level": "token", "treatment": "mask", "ratio_low": 0.5, "ratio_high": 1.5, "age_power": -0.5,
     "gate": "tv", "gate_bound": 0.1, "gate_side": "away", "veto": 0.5, "negative_mask": 0.05},
    {"surrogate": "topr", "ratio_high": 1.0},
    {"surrogate": "decoupled_ppo", "proximal": "log_linear", "ratio_level": "token", "ratio_high": 1.3,
     "clip_low": 0.8, "clip_high": 1.2},
    {"ratio_level": "token", "ratio_high": 1.5, "age_decay": 1.0},
    {"surrogate": "topr", "ratio_high": 1.0, "age_decay": 0.5, "age_decay_of": "failures"},
]  # fmt: skip


def kish(weights: list[float]) -> float:
    square = math.fsum(w * w for w in weights)
    return math.fsum(weights) ** 2 / (len(weights) * square) if square else 0.0


def weight(t: int, values: list[float], tokens: oracle.Tokens, algorithm: AlgorithmConfig) -> float:
    """What the gradient of token t's loss is a multiple of, besides its advantage."""
    policy = values
    if algorithm.surrogate == "decoupled_ppo":
        policy = [q + age / (1 + age) * (p - q)
                  for p, q, age in zip(values, tokens.behaviour, tokens.age, strict=True)]  # fmt: skip
    whole = algorithm.surrogate == "topr" and tokens.advantage[t] > 0
    corrected = 1.0 if whole else oracle.weight(t, policy, tokens, algorithm)
    return oracle.factor(t, values, tokens, algorithm) * corrected


def expected(values: list[float], tokens: oracle.Tokens, algorithm: AlgorithmConfig) -> dict[str, float]:
    n = len(values)
    ratio = [oracle.ratio(t, values, values, tokens, algorithm.ratio_level) for t in range(n)]
    low, high = zip(*(oracle.bounds(t, tokens, algorithm) for t in range(n)), strict=True)
    gate = [oracle.gate(t, values, tokens, algorithm) for t in range(n)]
    veto = [oracle.veto(t, values, tokens, algorithm.veto) for t in range(n)]
    negative = [oracle.negative(t, values, tokens, algorithm.negative_mask) for t in range(n)]
    trains = [all(three) for three in zip(gate, veto, negative, strict=True)]
    kept = [trains[t] and low[t] <= ratio[t] <= high[t] for t in range(n)]
    first = {tokens.attempt[t]: t for t in reversed(range(n))}.values()
    gap = [p - q for p, q in zip(values, tokens.behaviour, strict=True)]
    k3 = [oracle.divergence("k3", p, q) for p, q in zip(values, tokens.behaviour, strict=True)]
    by_age: dict[int, list[int]] = defaultdict(list)
    for t, age in enumerate(tokens.age):
        by_age[age].append(t)
    return {
        "ratio_mean": math.fsum(ratio) / n,
        "ratio_max": max(ratio),
        "clipped_low": sum(r < b for r, b in zip(ratio, low, strict=True)) / n,
        "clipped_high": sum(r > b for r, b in zip(ratio, high, strict=True)) / n,
        "gated": gate.count(False) / n,
        "vetoed": veto.count(False) / n,
        "negative_masked": negative.count(False) / n,
        "kept_fraction": sum(kept) / n,
        "ess": kish([weight(t, values, tokens, algorithm) for t in range(n)]),
        "ess_token": kish([oracle.ratio(t, values, values, tokens, "token") for t in range(n)]),
        "ess_sequence": kish([oracle.ratio(t, values, values, tokens, "sequence") for t in first]),
        "k3": math.fsum(k3) / n,
        "mismatch_mean": math.fsum(abs(g) for g in gap) / n,
        "mismatch_max": max(abs(g) for g in gap),
        "mismatch_large": sum(abs(g) > math.log(2) for g in gap) / n,
        "entropy_proxy": -math.fsum(values) / n,
        "tokens": n,
        **{f"age_k3/{age}": math.fsum(k3[t] for t in which) / len(which) for age, which in by_age.items()},
        **{f"age_kept/{age}": sum(kept[t] for t in which) / len(which) for age, which in by_age.items()},
    }


@pytest.mark.parametrize("name", [name for name in oracle.CASES if name != "empty"])
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(map(str, parts.values())))
def test_every_metric_equals_the_oracle(parts: dict[str, Any], name: str) -> None:
    algorithm = AlgorithmConfig(**parts)
    values, tokens = oracle.case(name)
    current, data = tensors_of(name)
    metrics = ratio_metrics(current, data, algorithm)
    assert metrics == pytest.approx(expected(values, tokens, algorithm), rel=1e-9, abs=1e-12)
    assert all(isinstance(value, float) for value in metrics.values())


def test_an_empty_batch_raises_no_alarm() -> None:
    current, data = tensors_of("empty")
    metrics = ratio_metrics(current, data, AlgorithmConfig())
    assert metrics["kept_fraction"] == metrics["ess"] == metrics["ess_sequence"] == 1.0
    assert metrics["tokens"] == metrics["mismatch_max"] == 0.0
    whole = ratio_metrics(*tensors_of("ordinary"), AlgorithmConfig())
    assert {name for name in whole if "/" not in name} == set(PERFECT)


@pytest.mark.parametrize("name", ["ordinary", "empty"])
def test_a_loss_of_ones_own_has_no_weights_to_judge(name: str) -> None:
    metrics = ratio_metrics(*tensors_of(name), AlgorithmConfig(loss="mine:own"))
    assert "ess" not in metrics
    assert metrics.keys() >= PERFECT.keys() - {"ess"}


def test_equal_policies_are_a_perfect_match() -> None:
    tokens = oracle.case("ordinary")[1]
    data = data_of(tokens)
    metrics = ratio_metrics(data.behaviour, data, AlgorithmConfig())
    shared = {name: metrics[name] for name in PERFECT if name not in ("entropy_proxy", "tokens")}
    assert shared == pytest.approx({name: PERFECT[name] for name in shared}, abs=1e-15)


def test_one_weight_among_many_is_worth_one() -> None:
    assert float(effective_share(torch.tensor([0.0, 0.0, 7.0, 0.0]))) == 0.25
    assert float(effective_share(torch.full((5,), 3.0))) == 1.0
    assert float(effective_share(torch.zeros(5))) == 0.0

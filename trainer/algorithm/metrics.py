"""What the importance ratios of a batch look like: the numbers by which one sees that data is too old to trust."""

from __future__ import annotations

import math

import torch

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.keep import factor, k3, passes_gate, passes_negative_mask, passes_veto
from trainer.algorithm.loss import surrogate_weight
from trainer.algorithm.ratios import bounds, importance_ratio
from trainer.algorithm.segments import segment_max, segment_sizes
from trainer.algorithm.tokens import TokenData

LARGE_GAP = math.log(2)  # a factor of 2 between the two policies' probabilities of a token

PERFECT = {
    **dict.fromkeys(("ratio_mean", "ratio_max", "kept_fraction", "ess", "ess_token", "ess_sequence"), 1.0),
    **dict.fromkeys(("clipped_low", "clipped_high", "gated", "vetoed", "negative_masked"), 0.0),
    **dict.fromkeys(("k3", "mismatch_mean", "mismatch_max", "mismatch_large", "entropy_proxy", "tokens"), 0.0),
}
"""Of an empty batch: what a perfect match would give, so that no alarm goes off."""


def ratio_metrics(proximal: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> dict[str, float]:
    """What the ratios π_prox/μ of a whole batch look like, each a mean over trained tokens unless it says otherwise:

    ratio_mean, ratio_max      the ratio at its level, before treatment
    clipped_low, _high         tokens whose ratio is below, above its bound; under "uncorrected" what these would clip
    gated, vetoed, negative_masked    tokens that the gate, the veto, the mask of failures stop, each by itself
    kept_fraction              tokens whose ratio is inside its bounds and that nothing stops
    ess                        effective sample size (Σw)²/(n·Σw²) of the weights of the loss, those by age included
                               (with "ppo" of its ratios between their bounds), 0 where nothing trains; a loss of one's
                               own has none
    ess_token, ess_sequence    the same of the ratios themselves: tokens', and whole attempts' over attempts
    k3                         e^Δ - 1 - Δ with Δ = log π_prox - log μ (clamped to ±20): estimates KL(μ ‖ π_prox)
    mismatch_mean, _max        |Δ|; mismatch_large: tokens with |Δ| > ln 2
    entropy_proxy              -log π_prox of what was sampled
    tokens                     trained tokens
    age_k3/A, age_kept/A       k3 and kept_fraction over the tokens of age A, for each age there is"""
    if not proximal.numel():
        return {name: value for name, value in PERFECT.items() if not (algorithm.loss and name == "ess")}
    proximal = proximal.double()
    data = data._replace(behaviour=data.behaviour.double())
    ratio = importance_ratio(proximal, data, algorithm.ratio_level)
    low, high = bounds(data, algorithm, ratio.dtype)
    gate = passes_gate(proximal, data, algorithm)
    veto = passes_veto(proximal, data, algorithm.veto)
    negative = passes_negative_mask(proximal, data, algorithm.negative_mask)
    kept = gate & veto & negative & (ratio >= low) & (ratio <= high)
    gap = proximal - data.behaviour
    divergence = k3(proximal, data.behaviour)
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clipped_low": _share(ratio < low),
        "clipped_high": _share(ratio > high),
        "gated": _share(~gate),
        "vetoed": _share(~veto),
        "negative_masked": _share(~negative),
        "kept_fraction": _share(kept),
        "ess_token": effective_share(importance_ratio(proximal, data, "token")),
        "ess_sequence": effective_share(_of_attempts(importance_ratio(proximal, data, "sequence"), data.attempt)),
        "k3": divergence.mean(),
        "mismatch_mean": gap.abs().mean(),
        "mismatch_max": gap.abs().max(),
        "mismatch_large": _share(gap.abs() > LARGE_GAP),
        "entropy_proxy": -proximal.mean(),
    }
    if not algorithm.loss:
        weight = factor(proximal, data, algorithm) * surrogate_weight(proximal, data, algorithm)
        values["ess"] = effective_share(weight)
    by_age = _by_age("age_k3", divergence, data.age) | _by_age("age_kept", kept.double(), data.age)
    return {name: float(value) for name, value in values.items()} | {"tokens": float(ratio.numel())} | by_age


def effective_share(weight: torch.Tensor) -> torch.Tensor:
    """(Σw)²/(n·Σw²) of n weights: which share of as many equal ones they are worth (Kish). 0 when all are 0."""
    square = weight.square().sum()
    return torch.where(square > 0, weight.sum().square() / (weight.numel() * square), torch.zeros_like(square))


def _share(which: torch.Tensor) -> torch.Tensor:
    return which.double().mean()


def _of_attempts(values: torch.Tensor, attempt: torch.Tensor) -> torch.Tensor:
    """One value of each attempt that has tokens, of values that are the same at all of them."""
    return segment_max(values, attempt)[segment_sizes(attempt) > 0]


def _by_age(name: str, values: torch.Tensor, age: torch.Tensor) -> dict[str, float]:
    """The mean of `values` [n] over the tokens of each age that occurs."""
    return {f"{name}/{each}": float(values[age == each].mean()) for each in torch.unique(age).tolist()}

"""Which tokens train: gates by the divergence of the two policies, the veto, the mask of off-policy failures.

What does not pass has weight 0 while the denominators stay as they are, so a batch of which little is left moves the
policy little. Everything here is a constant: no gradient flows through a decision. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from async_rl.algorithm_config import AlgorithmConfig
from trainer.algorithm.ratios import k2_of, k3_of
from trainer.algorithm.segments import segment_max, segment_mean
from trainer.algorithm.tokens import TokenData

LARGEST_LOGPROB = -(2.0**-24)  # of a certain token, as near to 1 as float32 comes: so log(1 - p) is finite


def binary_kl(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """KL(μ ‖ π) in nats [n] of whether this token is sampled or another one: μ log(μ/π) + (1-μ) log((1-μ)/(1-π)).
    From below it bounds the KL of the whole distributions (FlashREINFORCE; DPPO, arXiv 2602.04879)."""
    p, q = current.clamp(max=LARGEST_LOGPROB), behaviour.clamp(max=LARGEST_LOGPROB)
    return q.exp() * (q - p) - q.expm1() * (_log_rest(q) - _log_rest(p))


def _log_rest(logprob: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x < 0."""
    return (-logprob.expm1()).log()


def total_variation(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """|π - μ| of the sampled token [n]: the total variation of the binary distributions (DPPO, arXiv 2602.04879)."""
    return (current.exp() - behaviour.exp()).abs()


def k2(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """½ (log π/μ)² [n] (Schulman, joschu.net/blog/kl-approx.html)."""
    return k2_of(current - behaviour)


def k3(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """ρ - 1 - log ρ with ρ = π/μ [n], whose mean over what μ sampled is KL(μ ‖ π) (Schulman, as above)."""
    return k3_of(current - behaviour)


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "binary_kl": binary_kl,
    "tv": total_variation,
    "k2": k2,
    "k3": k3,
}


def passes_gate(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    """bool [n]: tokens whose divergence is at most gate_bound, or whose attempt's mean is (gate_level "sequence"). With
    gate_side "away" only those are stopped that the step would move further from μ: likelier already and A > 0, or
    unlikelier and A < 0 (DPPO)."""
    if algorithm.gate == "none":
        return torch.ones_like(data.attempt, dtype=torch.bool)
    behaviour = data.behaviour.double()
    divergence = DIVERGENCES[algorithm.gate](current.double(), behaviour)
    if algorithm.gate_level == "sequence":
        divergence = segment_mean(divergence, data.attempt)[data.attempt]
    passes = divergence <= algorithm.gate_bound
    if algorithm.gate_side == "away":
        passes = passes | ((current.double() - behaviour) * data.advantage.double() <= 0)
    return passes


def passes_veto(current: torch.Tensor, data: TokenData, veto: float) -> torch.Tensor:
    """bool [n]: false for all tokens of an attempt of which one has a ratio π/μ below `veto`: what the trainer holds to
    be next to impossible was not sampled from the policy that it thinks it was. 0 is no veto."""
    if veto == 0:
        return torch.ones_like(data.attempt, dtype=torch.bool)
    vetoed = (current.double() - data.behaviour.double()).exp() < veto
    return segment_max(vetoed.long(), data.attempt)[data.attempt] == 0


def passes_negative_mask(current: torch.Tensor, data: TokenData, bound: float) -> torch.Tensor:
    """bool [n]: false where A < 0 and the attempt's mean log(μ/π) is above `bound` nats: failures that the policy would
    not produce any more teach nothing (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556). 0 is no mask."""
    if bound == 0:
        return torch.ones_like(data.attempt, dtype=torch.bool)
    gap = segment_mean(data.behaviour.double() - current.double(), data.attempt)[data.attempt]
    return ~((data.advantage < 0) & (gap > bound))


def age_weight(age: torch.Tensor, decay: float) -> torch.Tensor:
    """(1 + age)^-decay: float64 [n]. Given to all tokens it shifts weight from old ones to young ones; where all are of
    one age that only scales the gradient, to which Adam is all but blind. Given to failures alone it shifts weight to
    what went well, the more the older the data."""
    return (1.0 + age.double()) ** -decay


def factor(current: torch.Tensor, data: TokenData, algorithm: AlgorithmConfig) -> torch.Tensor:
    """What each token's loss is multiplied with, float64 [n]: 0 where it does not train, else its weight by age; with
    age_decay_of "failures" that is 1 where A ≥ 0."""
    current = current.detach()
    kept = (
        passes_gate(current, data, algorithm)
        & passes_veto(current, data, algorithm.veto)
        & passes_negative_mask(current, data, algorithm.negative_mask)
    )
    weight = age_weight(data.age, algorithm.age_decay)
    if algorithm.age_decay_of == "failures":
        weight = torch.where(data.advantage < 0, weight, torch.ones_like(weight))
    return kept * weight

"""The loss once more, from the papers' formulas, token by token in plain Python floats: what the tests compare with.

Nothing here is shared with the code under test. A policy is a list of log-probabilities; `constant` is the policy that
stopped gradients see, so that a numeric difference in `current` alone gives the true gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Tokens(NamedTuple):
    """Plain lists, one entry per trained token; `proximal` where it is not the current policy."""

    behaviour: list[float]
    advantage: list[float]
    attempt: list[int]
    age: list[int]
    proximal: list[float] | None = None


def members(t: int, tokens: Tokens, level: str) -> list[int]:
    """The tokens whose log-ratios are taken together at token t."""
    if level == "token":
        return [t]
    same = [u for u in range(len(tokens.attempt)) if tokens.attempt[u] == tokens.attempt[t]]
    return [u for u in same if tokens.age[u] == tokens.age[t]] if level == "segment" else same


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def ratio(t: int, current: list[float], constant: list[float], tokens: Tokens, level: str) -> float:
    """π/μ at token t, of which only the token's own log-probability moves away from `constant`."""
    together = members(t, tokens, level)
    log_ratio = math.fsum(constant[u] - tokens.behaviour[u] for u in together)
    if level == "geometric":
        log_ratio /= len(together)
    return math.exp(clamp(log_ratio + current[t] - constant[t], -20, 20))


def bounds(t: int, tokens: Tokens, algorithm: Any) -> tuple[float, float]:
    oldest = max(tokens.age[u] for u in members(t, tokens, algorithm.ratio_level))
    power = (1 + oldest) ** algorithm.age_power
    return algorithm.ratio_low**power, algorithm.ratio_high**power


def weight(t: int, policy: list[float], tokens: Tokens, algorithm: Any) -> float:
    """The treated ratio policy/μ."""
    value = ratio(t, policy, policy, tokens, algorithm.ratio_level)
    low, high = bounds(t, tokens, algorithm)
    if algorithm.treatment == "uncorrected":
        return 1.0
    if algorithm.treatment == "mask":
        return value if low <= value <= high else 0.0
    return clamp(value, low, high)


def divergence(kind: str, log_p: float, log_q: float) -> float:
    """Of the trained policy p from the sampling one q, at one sampled token."""
    p, q = math.exp(log_p), math.exp(log_q)
    if kind == "tv":
        return abs(p - q)
    if kind == "k2":
        return (log_p - log_q) ** 2 / 2
    if kind == "k3":
        x = clamp(log_p - log_q, -20, 20)
        return math.exp(x) - 1 - x
    tiny = 2.0**-24
    rest_p, rest_q = max(1 - p, tiny), max(1 - q, tiny)
    return q * (log_q - log_p) + rest_q * (math.log(rest_q) - math.log(rest_p))


def gate(t: int, policy: list[float], tokens: Tokens, algorithm: Any) -> bool:
    if algorithm.gate == "none":
        return True
    judged = members(t, tokens, "sequence" if algorithm.gate_level == "sequence" else "token")
    values = [divergence(algorithm.gate, policy[u], tokens.behaviour[u]) for u in judged]
    if math.fsum(values) / len(values) <= algorithm.gate_bound:
        return True
    if algorithm.gate_side == "both":
        return False
    moved = policy[t] - tokens.behaviour[t]
    return not ((tokens.advantage[t] > 0 and moved > 0) or (tokens.advantage[t] < 0 and moved < 0))


def veto(t: int, policy: list[float], tokens: Tokens, bound: float) -> bool:
    together = members(t, tokens, "sequence")
    return bound == 0 or all(math.exp(policy[u] - tokens.behaviour[u]) >= bound for u in together)


def negative(t: int, policy: list[float], tokens: Tokens, bound: float) -> bool:
    together = members(t, tokens, "sequence")
    gap = math.fsum(tokens.behaviour[u] - policy[u] for u in together) / len(together)
    return bound == 0 or tokens.advantage[t] >= 0 or gap <= bound


def factor(t: int, policy: list[float], tokens: Tokens, algorithm: Any) -> float:
    trains = (
        gate(t, policy, tokens, algorithm)
        and veto(t, policy, tokens, algorithm.veto)
        and negative(t, policy, tokens, algorithm.negative_mask)
    )
    ages = algorithm.age_decay_of == "all" or tokens.advantage[t] < 0
    return (1 / (1 + tokens.age[t]) ** algorithm.age_decay if ages else 1.0) if trains else 0.0


def ppo(r: float, advantage: float, low: float, high: float, dual: float) -> float:
    objective = min(r * advantage, clamp(r, low, high) * advantage)
    if dual and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def surrogate(t: int, current: list[float], constant: list[float], tokens: Tokens, algorithm: Any) -> float:
    advantage = tokens.advantage[t]
    if algorithm.surrogate == "ppo":
        r = ratio(t, current, constant, tokens, algorithm.ratio_level)
        return ppo(r, advantage, *bounds(t, tokens, algorithm), algorithm.dual_clip)
    if algorithm.surrogate == "decoupled_ppo":
        proximal = tokens.proximal or constant
        if algorithm.proximal == "log_linear":
            between = zip(tokens.behaviour, constant, tokens.age, strict=True)
            proximal = [mu + age / (1 + age) * (pi - mu) for mu, pi, age in between]
        r = math.exp(clamp(current[t] - proximal[t], -20, 20))
        clipped = ppo(r, advantage, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
        return weight(t, proximal, tokens, algorithm) * clipped
    w = weight(t, constant, tokens, algorithm)
    if algorithm.surrogate == "topr" and advantage > 0:
        w = 1.0
    return -w * advantage * current[t]


def token_loss(t: int, current: list[float], constant: list[float], tokens: Tokens, algorithm: Any) -> float:
    return factor(t, constant, tokens, algorithm) * surrogate(t, current, constant, tokens, algorithm)


def gradient(t: int, current: list[float], tokens: Tokens, algorithm: Any, step: float = 1e-6) -> float:
    """d(loss of token t)/d(its log-probability) by a central difference."""
    up, down = list(current), list(current)
    up[t] += step
    down[t] -= step
    difference = token_loss(t, up, current, tokens, algorithm) - token_loss(t, down, current, tokens, algorithm)
    return difference / (2 * step)


def case(name: str) -> tuple[list[float], Tokens]:
    """A batch, ordinary or hostile in one way: the current policy and the rest. Attempt 3 has no tokens."""
    generator = np.random.default_rng(7)
    lists = {"empty": [], "length_one": [0], "lone_tokens": [0, 1, 2]}
    attempt = lists.get(name, [0, 0, 0, 1, 1, 2, 2, 2, 2, 4])
    n = len(attempt)
    behaviour = -generator.exponential(1.0, n)
    current = np.minimum(behaviour + generator.normal(0, 0.4, n), 0.0)
    advantage = generator.normal(0, 1, 5)[attempt] if n else np.zeros(0)
    age = np.array([4, 3, 3, 0, 0, 16, 16, 15, 0, 1])[:n]
    if name == "gap_200":
        current[0] = behaviour[0] - 200.0
        behaviour[5] = current[5] - 200.0
    if name == "certain":
        current[:3], behaviour[1:4] = 0.0, 0.0
    if name == "one_sided":
        advantage = np.abs(advantage)
    if name == "all_negative":
        advantage = -np.abs(advantage) * 50
    return current.tolist(), Tokens(behaviour.tolist(), advantage.tolist(), list(attempt), age.tolist())


CASES = ("ordinary", "empty", "length_one", "lone_tokens", "gap_200", "certain", "one_sided", "all_negative")

"""What an evaluation comes to: mean@k and pass@k over instances, with 95 % intervals.

Instances are the units: samples of one instance resemble each other, so k samples each of n instances say less than
k·n instances would (Miller 2024, arXiv:2411.00640). Of values in [0, 1] the interval is Wilson's (1927) at the
effective number of samples, p (1 - p) over the variance of the mean as the instances show it (Kish's design effect, at
least 1: Franco, Little, Louis and Slud 2019); of one sample each that are right or wrong, it is Wilson's as it is. Of
other values it is the normal one, ± 1.96 standard errors over instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Z95 = 1.959964  # of the normal distribution: 95 % lie within ± this many standard deviations


class Interval(NamedTuple):
    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over `instances`. `interval` is None where so few say nothing of it."""

    value: float
    interval: Interval | None
    instances: int


def wilson(share: float, n: float) -> Interval:
    """The 95 % score interval of a rate seen in n samples (Wilson 1927). Of rewards anywhere in [0, 1] it is on the
    wide side: no such variable varies more than one that is 0 or 1 with the same mean."""
    square = Z95 * Z95
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z95 / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """How likely k of an instance's n samples, drawn without putting back, hold a correct one: 1 - C(n - c, k) /
    C(n, k), the unbiased estimate of pass@k (Chen et al. 2021, arXiv:2107.03374). 1 ≤ k ≤ n."""
    return 1.0 - math.prod((n - correct - index) / (n - index) for index in range(k))


def estimate(scores: Sequence[float], independent: int) -> Estimate:
    """The mean of one score for each instance, which came of so many `independent` tries of it at most. Not a number
    of nothing."""
    n = len(scores)
    if not n:
        return Estimate(math.nan, None, 0)
    mean = math.fsum(scores) / n
    squares = math.fsum((score - mean) ** 2 for score in scores)
    if min(scores) >= 0 and max(scores) <= 1:
        mean = min(1.0, max(0.0, mean))
        return Estimate(mean, wilson(mean, _effective(mean, squares / n, n, independent)), n)
    if n == 1:
        return Estimate(mean, None, n)
    half = Z95 * math.sqrt(squares / (n - 1) / n)
    return Estimate(mean, Interval(mean - half, mean + half), n)


def _effective(mean: float, variance: float, n: int, independent: int) -> float:
    """Samples that would tell as much of a rate, from n (each instance one sample) to n · independent."""
    if mean in (0.0, 1.0):
        return n  # without any variation nothing says that the samples of an instance are independent
    most = n * independent
    return max(n, min(most, mean * (1 - mean) * n / variance)) if variance else most


def evaluate(
    rewards: npt.NDArray[np.float64], pass_reward: float, pass_at: Sequence[int]
) -> tuple[Estimate, dict[int, Estimate]]:
    """mean@k, and pass@k for each k of `pass_at`. `rewards` [instances, samples], not a number where a sample was
    cancelled: an instance counts with those that it has, and for pass@k only if these are k or more."""
    there = ~np.isnan(rewards)
    counts = there.sum(axis=1)
    correct = (rewards >= pass_reward).sum(axis=1)  # of what is not a number, this is false
    sums = [math.fsum(row[kept]) for row, kept in zip(rewards, there, strict=True)]
    pairs = list(zip(map(int, counts), map(int, correct), strict=True))
    mean = estimate([total / n for total, (n, _) in zip(sums, pairs, strict=True) if n], rewards.shape[1])
    passes = {
        k: estimate([pass_at_k(n, c, k) for n, c in pairs if n >= k], rewards.shape[1] // k) for k in pass_at
    }
    return mean, passes


def eval_record(
    version: int, name: str, rewards: npt.NDArray[np.float64], pass_reward: float, pass_at: Sequence[int]
) -> dict[str, Any]:
    """One evaluation as metrics.jsonl has it (async_rl.run.metrics)."""
    mean, passes = evaluate(rewards, pass_reward, pass_at)
    done = int((~np.isnan(rewards)).sum())
    return {
        "version": version,
        "set": name,
        "reward": mean.value,
        "interval": mean.interval and list(mean.interval),
        "n": done,
        "instances": mean.instances,
        "samples": rewards.shape[1],
        "cancelled": rewards.size - done,
        "pass": {
            str(k): {"value": each.value, "interval": each.interval and list(each.interval), "n": each.instances}
            for k, each in passes.items()
        },
    }

"""How far a step may move the policy, and how much of a proposed one that is: pure rules over floats.

Divergences are in nats a token.
"""

from __future__ import annotations

import math

KEPT = 0.7  # of the running mean of the mismatch at each step; the rest is what was measured since the one before
FLOOR = 0.5  # of the budget stays whatever the mismatch: a step is never made for nothing


def budget_at(step: int, steps: int, first: float, last: float) -> float:
    """The budget of step `step` (from 0) of `steps`: a cosine from `first` at the first to `last` at the last step,
    and that beyond."""
    if step < 0 or steps < 1:
        raise ValueError(f"step {step} of {steps}: steps count from 0 and there is at least one")
    progress = min(step / (steps - 1), 1.0) if steps > 1 else 0.0
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * progress))


def smoothed(mismatch: float, observed: float) -> float:
    """The running mean of the engines' divergence from the trainer, after another was measured."""
    return KEPT * mismatch + (1.0 - KEPT) * max(observed, 0.0)


def left_of(budget: float, mismatch: float) -> float:
    """What a step may use of its budget: the engines' divergence has already used some."""
    return max(budget - mismatch, FLOOR * budget)


def noise_of(applied: float, realised: float, length: float) -> float:
    """What rounding the weights stochastically costs, in nats for each unit of a step's `length`, by one step that was
    taken: what was realised beyond what was `applied`. The variance of a weight that is rounded is |δ| (ulp − |δ|) for
    a change δ: while changes are small it grows with the length, and so does the divergence that comes of it."""
    return max(realised - applied, 0.0) / length if length > 0 else 0.0


def averaged(noise: float | None, seen: float) -> float:
    """The running mean of it, after one more step; None before the first."""
    return seen if noise is None else KEPT * noise + (1.0 - KEPT) * seen


def scale_for(divergence: float, budget: float, largest: float, noise: float = 0.0) -> float:
    """How many times as long as proposed a step is to be, at most `largest`, when the proposal's predicted divergence
    grows with the square of its length, and that of storing it (`noise`, of the step as proposed) with its length: the
    positive root s of divergence·s² + noise·s = budget. A proposal that changes nothing is left as it is. Raises
    FloatingPointError for a divergence that cannot be one."""
    if not (math.isfinite(divergence) and divergence >= 0):
        raise FloatingPointError(f"predicted divergence {divergence}")
    if divergence == 0:
        return min(1.0, largest)
    # Divided this way round nothing cancels; and what is too small for its square is no reason to divide by it.
    half = math.hypot(noise / 2, math.sqrt(divergence) * math.sqrt(budget)) + noise / 2
    return min(largest, budget / half) if half > 0 else largest

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


def scale_for(divergence: float, budget: float, largest: float) -> float:
    """How many times as long as proposed a step is to be, at most `largest`, when the proposal's predicted divergence
    grows with the square of its length. A proposal that changes nothing is left as it is. Raises FloatingPointError
    for a divergence that cannot be one."""
    if not (math.isfinite(divergence) and divergence >= 0):
        raise FloatingPointError(f"predicted divergence {divergence}")
    if divergence == 0:
        return min(1.0, largest)
    return min(largest, math.sqrt(budget / divergence))

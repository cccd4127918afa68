"""The learning rate, as a pure function of the step."""

from __future__ import annotations

from async_rl.config import TrainerConfig


def learning_rate_at(step: int, steps: int, trainer: TrainerConfig) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up that reaches the full rate at the last of
    `warmup_steps`, then linear decay to `final_learning_rate` (a fraction) at the last step, and constant beyond."""
    if step < 0 or steps < 1:
        raise ValueError(f"step {step} of {steps}: steps count from 0 and there is at least one")
    if step < trainer.warmup_steps:
        return trainer.learning_rate * (step + 1) / trainer.warmup_steps
    peak = max(trainer.warmup_steps - 1, 0)
    last = steps - 1
    if last <= peak:
        return trainer.learning_rate
    progress = min((step - peak) / (last - peak), 1.0)
    return trainer.learning_rate * (1.0 - (1.0 - trainer.final_learning_rate) * progress)

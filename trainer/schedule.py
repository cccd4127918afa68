"""The learning rate (or update ratio), as a pure function of the step."""

from __future__ import annotations

from async_rl.config import TrainerConfig
from async_rl.trainer_config import peak_rate


def rate_at(step: int, steps: int, trainer: TrainerConfig) -> float:
    """Learning rate, or a sketch's update ratio, of step `step` (from 0) of `steps`: linear warm-up that reaches the
    full rate at the last of `warmup_steps`, then linear decay to `final_learning_rate` (a fraction) at the last step,
    and constant beyond."""
    if step < 0 or steps < 1:
        raise ValueError(f"step {step} of {steps}: steps count from 0 and there is at least one")
    highest = peak_rate(trainer)
    if step < trainer.warmup_steps:
        return highest * (step + 1) / trainer.warmup_steps
    peak = max(trainer.warmup_steps - 1, 0)
    last = steps - 1
    if last <= peak:
        return highest
    progress = min((step - peak) / (last - peak), 1.0)
    return highest * (1.0 - (1.0 - trainer.final_learning_rate) * progress)

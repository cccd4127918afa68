"""The table [algorithm.alarms]: when a run that goes wrong is stopped. The rules are trainer.alarms'."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.schema import NonNegative, PositiveInt, Section

Share = Annotated[float, Meta(ge=0, le=1)]


class AlarmConfig(Section, frozen=True, kw_only=True):
    """Each bound turns its alarm off by being 0. They warn at the first step beyond it, and stop the run after `steps`
    such in a row."""

    action: Literal["stop", "warn"] = "stop"
    """warn: only say it, in the trainer's log."""
    steps: PositiveInt = 3
    learning_low: Share = 0.05
    """Least share of the tokens with an advantage that move the policy, as gates and bounds do not stop them."""
    ess_low: Share = 0.02
    """Least effective sample size of the weights, as a share of the sample."""
    ess_warn: Share = 0.3
    k3_high: NonNegative = 1.0
    """Largest k3 estimate, in nats a token, of the divergence between what sampled and what trains."""
    k3_warn: NonNegative = 0.1
    grad_norm_factor: NonNegative = 100.0
    """How many times its median over earlier steps the gradient's norm may be."""
    reward_drop: Share = 0.5
    """How much of the best mean reward of 8 steps may be lost in a later mean, as a share of its distance from the
    lowest reward of any attempt. Here a single step beyond the bound is enough. Only a warning where past rewards
    decide what is asked (buffer.retire_above, difficulty): that makes tasks harder on purpose."""

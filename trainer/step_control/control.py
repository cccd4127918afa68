"""A step whose length is chosen: propose, predict, scale, take, and look at what it did."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.trainer_config import StepControlConfig
from async_rl.trajectory import MaskReason
from trainer.backend import Sample
from trainer.learnable import Learnable, Proposal
from trainer.logprobs import Scorer
from trainer.step_control.budget import averaged, budget_at, left_of, noise_of, scale_for, smoothed
from trainer.step_control.predicted import Predictor
from trainer.step_control.probe import Probe
from trainer.step_control.widened import in_float32

LEAST_PLACES = 64  # of a response are looked at, even when its prompt alone is longer than what it may take

log = logging.getLogger("trainer")


class ControlState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes on after a resume: steps taken, the running mean of the engines' divergence (nats a token), what
    was observed of it since the last step, and the running mean of what rounding costs (nats a token for each unit of
    a step's length, which is scale times rate); None before the first step of weights that round."""

    steps: int = 0
    mismatch: float = 0.0
    observed: tuple[float, ...] = ()
    noise: float | None = None


class StepControl:
    """Step control of a run of `steps` optimiser steps on `scorer`'s model, at sampling `temperature`."""

    def __init__(self, config: StepControlConfig, scorer: Scorer, temperature: float, steps: int) -> None:
        self._config = config
        self._scorer = scorer
        self._temperature = temperature
        self._run_steps = steps
        self._predict = Predictor(config.method)
        self._state = ControlState()

    def observe(self, divergence: float) -> None:
        """A node's divergence from the trainer (mean k3 of a flip probe, nats a token): at the next step it counts,
        with others since the last one, against the budget. What is not finite is not counted."""
        if math.isfinite(divergence):
            self._state = msgspec.structs.replace(self._state, observed=(*self._state.observed, divergence))

    def step(self, learnable: Learnable, norm: float, rate: float, samples: Sequence[Sample]) -> dict[str, float]:
        """Take the step that `learnable` proposes from what was accumulated of `samples`, at the length that its
        budget allows. `norm` and `rate` as in `Learnable.move`.

        Metrics, in nats a token at a few of the batch's places: `predicted_kl` of the step as proposed, `applied_kl`,
        the same prediction at the length taken, `realised_kl`, what it became; `kl_budget`, less the engines'
        `mismatch`; and `step_scale`. Where storing
        a step adds noise (`Learnable.rounds`), `noise_kl` is what of the budget was left to that, and `realised_kl` is
        of the weights alone, as float32 arithmetic sees them.

        Raises FloatingPointError when the divergence cannot be predicted; weights, optimiser and control are then, or
        when anything else is raised before the step is taken, as before. Raises it too when what the step has become is
        not finite: then the weights have moved, and control has gone on with them."""
        state, config = self._state, self._config
        mismatch = smoothed(state.mismatch, fmean(state.observed)) if state.observed else state.mismatch
        budget = left_of(budget_at(state.steps, self._run_steps, config.budget, config.final_budget), mismatch)
        noise = (state.noise or 0.0) * rate
        restore = learnable.snapshot()
        try:
            proposal = learnable.propose(norm, rate)
            probe = self._probe(samples, proposal)
            predicted, before = self._predict(probe, proposal)
            scale = scale_for(predicted, budget, config.max_scale, noise)
            if learnable.rounds:
                before = in_float32(probe.outputs)
        except BaseException as error:
            restore()
            if isinstance(error, FloatingPointError):
                raise FloatingPointError(
                    f"step control, after {state.steps} optimiser steps: {error}; weights and optimiser are unchanged"
                ) from error
            raise
        # From here on there is nothing to go back to: a kind whose own weights move would have to copy all of them.
        del restore
        learnable.take(proposal, scale)
        self._state = ControlState(state.steps + 1, mismatch, noise=state.noise)
        realised = probe.realised(before, in_float32(probe.outputs) if learnable.rounds else probe.outputs())
        if not math.isfinite(realised):
            raise FloatingPointError(
                f"step control, after {state.steps} optimiser steps: the next was taken, and its divergence is "
                f"{realised}"
            )
        applied = predicted * scale * scale
        seen = averaged(state.noise, noise_of(applied, realised, scale * rate)) if learnable.rounds else None
        self._state = msgspec.structs.replace(self._state, noise=seen)
        metrics = {
            "predicted_kl": predicted,
            "applied_kl": applied,
            "realised_kl": realised,
            "step_scale": scale,
            "kl_budget": budget,
            "mismatch": mismatch,
        }
        return metrics if seen is None else metrics | {"noise_kl": noise * scale}

    def _probe(self, samples: Sequence[Sample], proposal: Proposal) -> Probe:
        """A few segments of the batch, the same ones whenever the same step is taken again."""
        places = {index: np.flatnonzero(sample.mask == MaskReason.SAMPLED) for index, sample in enumerate(samples)}
        able = [index for index, found in places.items() if found.size]
        count = min(self._config.responses, len(able))
        chosen = np.random.default_rng(self._state.steps).choice(able, count, replace=False).tolist()
        most = self._config.probe_tokens // max(count, 1)
        wanted = [_within(places[index], most) for index in chosen]
        tokens = [samples[index].tokens for index in chosen]
        return Probe(self._scorer, tokens, wanted, self._temperature, proposal)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON values, for `restore`."""
        state: dict[str, Any] = msgspec.to_builtins(self._state)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was called. Raises AsyncRLError for anything else."""
        try:
            self._state = msgspec.convert(state, ControlState)
        except msgspec.ValidationError as error:
            raise AsyncRLError(f"the state of step control in a checkpoint cannot be understood: {error}") from error


def _within(places: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """The places that lie in the first `most` tokens, and the first few in any case."""
    kept = int(np.searchsorted(places, most))
    return places[: max(kept, LEAST_PLACES)]

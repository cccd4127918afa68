"""How far a proposed step will move the policy: from the derivative of its logits in the step's direction.

For a displacement Δ of the weights, dz = J Δ is what it changes of the logits to first order, and ½ Var_p(dz / T) the
divergence that follows, to second order in Δ: the quadratic form that TRPO (arXiv 1502.05477) solves for a direction
is used here to choose a length. It is no bound: it says nothing of what comes after the second order.
"""

from __future__ import annotations

import logging
import math
from typing import Literal, NamedTuple

import torch
from torch.autograd import forward_ad

from trainer.learnable import Proposal
from trainer.step_control.probe import Probe
from trainer.step_control.tangents import along, is_nothing, shifted, undual

Method = Literal["auto", "jvp", "difference"]

SPREADS = {torch.float64: 1e-4, torch.float32: 3e-2, torch.float16: 1e-1, torch.bfloat16: 3e-1}
"""The standard deviation of the logits' changes, in nats, at which a difference of two passes is taken in each dtype:
where rounding, which falls with it, and curvature, which grows with its square, are together least."""
NEAR = 4.0  # a difference taken within this factor of it is good enough
TRIES = 4  # to get there
FAINT = 1e3  # how much longer the next try is when the last showed nothing at all

log = logging.getLogger("trainer")


class Prediction(NamedTuple):
    """The divergence in nats, mean over the probe's places, and the probe's outputs before the step."""

    divergence: float
    before: list[torch.Tensor]


class Predictor:
    """Predicts by one forward pass with directional derivatives ("jvp"), by the difference of two passes, or ("auto")
    by the first of these that the model can compute."""

    def __init__(self, method: Method = "auto") -> None:
        self._method = method

    def __call__(self, probe: Probe, proposal: Proposal) -> Prediction:
        """Raises FloatingPointError when the prediction is not finite, or when nothing of a proposal that changes
        weights arrives at the logits: then some operator has lost the derivative. With "jvp", NotImplementedError for
        an operator without forward mode."""
        with torch.no_grad():
            found = self._predict(probe, proposal)
        if not math.isfinite(found.divergence):
            raise FloatingPointError(f"the divergence predicted for the step is {found.divergence}")
        return found

    def _predict(self, probe: Probe, proposal: Proposal) -> Prediction:
        if self._method != "difference":
            try:
                return _by_jvp(probe, proposal)
            except NotImplementedError as error:
                if self._method == "jvp":
                    raise
                self._method = "difference"
                reason = str(error).partition("\n")[0]
                log.warning("step control: predicts by the difference of two passes from now on (%s)", reason)
        return _by_difference(probe, proposal)


def _by_jvp(probe: Probe, proposal: Proposal) -> Prediction:
    with forward_ad.dual_level():
        duals = [undual(out) for out in along(probe.model, proposal, probe.outputs)]
    before = [primal for primal, _ in duals]
    changes = [tangent for _, tangent in duals]
    found = [change for change in changes if change is not None]
    if len(found) < len(changes) or not any(change.any() for change in found):
        return _none(proposal, before)
    return Prediction(probe.predicted(before, found), before)


def _by_difference(probe: Probe, proposal: Proposal) -> Prediction:
    """The step's length in the difference is found by trying: from the step itself, until the logits change by what
    their dtype can show."""
    before = probe.outputs()
    wanted, length, divergence = SPREADS[before[0].dtype], 1.0, 0.0
    for _ in range(TRIES):
        up, down = (shifted(probe.model, proposal, sign * length, probe.outputs) for sign in (1.0, -1.0))
        changes = [_difference(plus, minus) / (2 * length) for plus, minus in zip(up, down, strict=True)]
        divergence = probe.predicted(before, changes)
        spread = math.sqrt(2 * divergence) * length  # the mean of ½ Var is the divergence
        if not math.isfinite(spread) or wanted / NEAR <= spread <= wanted * NEAR:
            return Prediction(divergence, before)
        length *= wanted / spread if spread else FAINT
    if divergence == 0 and not any(change.any() for change in changes):
        return _none(proposal, before)
    return Prediction(divergence, before)


def _difference(plus: torch.Tensor, minus: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(plus.dtype, torch.float32)
    return plus.to(wide) - minus.to(wide)


def _none(proposal: Proposal, before: list[torch.Tensor]) -> Prediction:
    """Of logits that do not change."""
    if is_nothing(proposal):
        return Prediction(0.0, before)
    raise FloatingPointError(
        "the step changes weights, and the derivative of the logits in its direction is zero: an operator of the model "
        'has lost it; set [trainer.step_control] method = "difference"'
    )

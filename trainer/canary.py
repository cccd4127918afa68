"""The canary: a policy of seeded noise in every target, which no training would make and no served base looks like.

A fresh adapter is the base policy exactly (B is zero), and after a few steps still nearly so: then a node that serves
the base, or the adapter at twice its scale, differs from the trainer by less than two engines do. The canary is as
large as matters from the start: in each target scale·B·A has a tenth of W's Frobenius norm, or as much more as it takes
to move some log-probability of the probe by CANARY_FLOOR.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from async_rl.policy.adapter import TENSOR_PREFIX
from async_rl.proof import CANARY_FLOOR

STRENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6)  # shares of W's norm; the first that reaches the floor

log = logging.getLogger("learner")

Scores = list[npt.NDArray[np.float32]]


class Canary(NamedTuple):
    """Log-probabilities of the probe under the canary and under the base model, and the digest of its file."""

    digest: str
    logprobs: Scores
    base: Scores


def make_canary(
    parameters: Mapping[str, nn.Parameter],
    fill: Callable[[float], None],
    score: Callable[[], Scores],
    export: Callable[[], str],
) -> Canary:
    """`fill` the adapter's `parameters` with `noise` of a strength, `score` and `export` it, and put everything back,
    bit for bit. A model that no strength moves by the floor (a head that was never trained, or targets that hardly
    matter) gets the strongest, and a warning."""
    with _borrowed(parameters), torch.no_grad():
        fill(0.0)
        base = score()
        for strength in STRENGTHS:
            fill(strength)
            logprobs = score()
            far = distance(logprobs, base)
            if far >= CANARY_FLOOR:
                break
        else:
            log.warning("the canary moves no log-probability by more than %.2g nats: it shows only faults that do", far)
        return Canary(export(), logprobs, base)


def noise(
    shapes: Mapping[str, tuple[int, int]], norm_of: Callable[[str], float], scale: float, seed: int, strength: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the adapter file whose shape is given, float64, sorted by name. `norm_of` gives the Frobenius norm
    of a module's weight, by path (`same_norm`); of what experts share, the root mean square of theirs. `scale` is the
    adapter's. E‖B·A‖² = r · (in · 1/in) · (out · 1/(r · out)) = 1 for A of variance 1/in and B of 1/(r · out)."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(shapes):
        rows, columns = shapes[name]
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        module, _, part = name.removeprefix(TENSOR_PREFIX).removesuffix(".weight").rpartition(".")
        if part == "lora_A":
            yield name, values * columns**-0.5
        else:
            yield name, values * (strength * norm_of(module) / (abs(scale) * (rows * columns) ** 0.5))


def same_norm(square: float) -> float:
    """A norm from the sum of squares, to six digits: so many are the same however the weights lie on ranks, and so is
    the canary."""
    return float(f"{square**0.5:.6g}")


def distance(ours: Scores, theirs: Scores) -> float:
    """The largest difference of two lists of log-probabilities, in nats."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@contextmanager
def _borrowed(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])

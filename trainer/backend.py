"""The contract of a trainer backend: what the learner needs from whatever holds the weights.

A backend loads the model, computes log-probabilities, takes optimiser steps, exports the policy for the inference
nodes and checkpoints itself. It knows nothing of buffers, tickets or versions; the learner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from async_rl.top_tokens import TopTokens
from trainer.canary import Canary
from trainer.push_sizes import PushSizes


class Sample(NamedTuple):
    """One segment to train on, all arrays of length n (flat, unpadded): token ids int32, behaviour log-probabilities
    float32 (natural log, at sampling temperature), mask uint8 (0 = sampled, trains), token ages int32 in versions
    (for_version - the token's; only meaningful where mask is 0), `advantage` of its attempt, and the index of the
    attempt and group within the batch (what "sequence" and "prompt" mean in a loss). `top`: the sampler's likeliest
    tokens at each place, [n, k], where scores are centred. `routes` int16 [n, layers, k]: the experts that each
    position went to in each layer of the model, counted from its first (a layer without experts has -1), where they
    are to be replayed; -1 is unknown."""

    tokens: npt.NDArray[np.int32]
    behaviour: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint8]
    ages: npt.NDArray[np.int32]
    advantage: float
    attempt: int
    group: int
    top: TopTokens | None = None
    routes: npt.NDArray[np.int16] | None = None


class StepResult(NamedTuple):
    """`metrics` of the loss and the ratios (float each); `proximal` are the log-probabilities of each sample's
    tokens under the policy before the update: float32[n] each, 0 where mask is not 0; `skipped` is true when nothing
    could be learned (no trainable token, or every gradient zero) and the weights are unchanged."""

    metrics: dict[str, float]
    proximal: list[npt.NDArray[np.float32]]
    skipped: bool


class Backend(Protocol):
    @property
    def vocabulary_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""

    @property
    def modules(self) -> tuple[str, ...]:
        """What a node has to have matched: full paths of the modules that the policy adapts, or, of whole weights, the
        names of all parameters."""

    @property
    def publishes_canary(self) -> bool:
        """Whether there is a canary to publish: not for policies of which a node holds one copy."""

    @property
    def push_sizes(self) -> PushSizes:
        """What a version would take in other forms."""

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        """One optimiser step on a whole batch, whatever micro-batches it takes, at this learning rate (or update
        ratio). Raises FloatingPointError when the loss, the gradient or the divergence that step control predicts is
        not finite; the weights are then unchanged. Raises it too when step control finds that the divergence of the
        step it has taken is not finite: the weights have moved then, but for several updates a batch, which go back."""

    def observe(self, divergence: float) -> None:
        """A node's divergence from the trainer (mean k3 of a flip probe, nats a token), for step control."""

    def reference(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of each sample's tokens under the base model, at sampling temperature: float32[n] each, 0
        where mask is not 0. Raises as `step` does, and where the base model is not kept."""

    def logprobs(
        self, tokens: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of given sequences under the current weights: for n tokens float32[n-1], entry t for
        token t+1 (the same shape as Engine.score)."""

    def export(self, path: Path) -> str:
        """Write the policy as one file, once for each version, and return its digest: an adapter
        (async_rl.policy.adapter), or what async_rl.policy.update_file has for the other kinds. The file says which."""

    def export_whole(self, path: Path) -> str:
        """Write it as a file that stands alone, under the digest of the last `export`."""

    def canary(self, path: Path, seed: int, tokens: Sequence[npt.NDArray[np.int32]]) -> Canary:
        """Write a policy of seeded noise in every target as an adapter file, and score `tokens` under it and under
        the base model (trainer.canary). The weights are afterwards what they were, bit for bit."""

    def export_final(self, folder: Path) -> None:
        """Write the policy for people: in PEFT layout, or as a whole Hugging Face checkpoint."""

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on exactly: what learns, optimiser, counters. Atomic is the caller's
        business."""

    def load(self, folder: Path) -> None: ...

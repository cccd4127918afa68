"""What of the model learns, and how it moves: the contract of a trainer kind (trainer.kind).

The backend accumulates gradients over micro-batches by `backward`; a learnable collects what it needs of them, whether
in parameters' `grad` or in sketches of its own, and takes the step. All state that a step changes is here: weights
that learn, the optimiser, counters. It is built as `Kind(model, trainer, seed, model_path)` on a model that is on its
device, in place: it decides which parameters require gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch


class LowRank(NamedTuple):
    """A change of a linear module's weight W [out, in], which is b @ a: float32 a [r, in], b [out, r]. Of a projection
    of experts b has their number in front, and a may too."""

    a: torch.Tensor
    b: torch.Tensor


class Proposal(NamedTuple):
    """A step before it is taken. The change of each linear module's weight is the sum of its `tangents`, by module
    path, to first order of the step's length; `dense` has the change of whole parameters, by name. `own` is what the
    learnable that proposed it needs to take it."""

    tangents: Mapping[str, Sequence[LowRank]]
    dense: Mapping[str, torch.Tensor]
    own: Any = None


class Learnable(Protocol):
    @property
    def modules(self) -> tuple[str, ...]:
        """What a node has to have matched, sorted, for proofs of delivery: full paths of the modules with an adapter,
        or the names of all parameters where a policy is all weights."""

    @property
    def steps(self) -> int:
        """Optimiser steps that were taken."""

    @property
    def has_base(self) -> bool:
        """Whether the base model can still be computed: with LoRA, by `trainer.lora.adapter_off`."""

    @property
    def rounds(self) -> bool:
        """Whether storing a step adds noise to it: weights narrower than float32, rounded stochastically."""

    def zero(self) -> None:
        """Forget what was accumulated."""

    def norm(self) -> float:
        """Of what was accumulated (gradients, or sketches); 0 if there is nothing to learn from. Not finite when some
        of it is not."""

    def propose(self, norm: float, rate: float) -> Proposal:
        """The step that `move` would take. The optimiser's state moves on, the weights do not."""

    def take(self, proposal: Proposal, scale: float) -> None:
        """weights <- weights + scale * proposal, the one proposed last; counts as a step."""

    def move(self, norm: float, rate: float) -> None:
        """`propose`, and `take` at scale 1, without the detour where that is quicker. `norm` is what `norm()` gave;
        `rate` the scheduled learning rate, or update ratio."""

    def metrics(self) -> dict[str, float]:
        """What there is to say of the step taken last, by name."""

    def snapshot(self) -> Callable[[], None]:
        """Keep weights, optimiser and counters; the function returned puts them back, bit for bit."""

    def export(self, path: Path) -> str:
        """Write the policy's file, and return its digest. Where a file says only what has changed (factor updates), it
        is what was taken since the last export, and none of it is an update without tensors; the first export after
        `load` writes once more the file that was written last before `save`, to the byte."""

    def export_whole(self, path: Path) -> str:
        """Write all that learns, self-contained, and return the same digest as the last `export`."""

    def export_final(self, folder: Path) -> None:
        """Write what people load: a PEFT folder, or a whole Hugging Face checkpoint."""

    def save(self, folder: Path) -> None:
        """Write what `load` needs to go on exactly into an existing folder, and what `async-rl export` does: counters
        (trainer.optimizer_state.Counters), and an adapter file or, of kinds that move the model's own weights, a
        snapshot as `optimizer_state.WEIGHTS_FILE`."""

    def load(self, folder: Path) -> None:
        """Go on exactly where `save` was called. Nothing changes when it raises AsyncRLError: for files that are
        missing or broken, or that belong to another configuration."""

"""A few places of a batch at which the policies before and after a step are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.head import plain_logits
from trainer.learnable import Proposal
from trainer.logprobs import Rows, Scorer, padded_rows
from trainer.packing import pack
from trainer.step_control.divergence import CHUNK, divergence, quadratic
from trainer.step_control.tangents import moves

ROW_TOKENS = 1024  # computed at once; a longer sequence is computed alone, as its attention is kept whole


class Probe:
    """`wanted` are the places (≥ 1, rising) of each sequence's tokens whose distributions are compared, at sampling
    `temperature`, before and after `proposal`.

    Sequences are computed as padded rows, with attention and experts as plain matrix products: other kernels have no
    forward mode, and two passes are only comparable if they round alike."""

    def __init__(
        self,
        scorer: Scorer,
        sequences: Sequence[npt.NDArray[np.int32]],
        wanted: Sequence[npt.NDArray[np.intp]],
        temperature: float,
        proposal: Proposal,
    ) -> None:
        self.model: nn.Module = scorer.model
        self.places = sum(len(places) for places in wanted)
        self._scorer = scorer
        self._temperature = temperature
        head = scorer.head
        # The trainer's own rule for a head that is computed in float32 (trainer.head); it is also linear, and stays.
        frozen = type(head) is nn.Linear and not any(each.requires_grad for each in head.parameters())
        self._linear = scorer.chunked and frozen and not moves(scorer.model, head, proposal)
        batches = pack([int(places[-1]) for places in wanted], range(len(wanted)), ROW_TOKENS, padded=True)
        self._rows: list[Rows] = [
            padded_rows([sequences[row] for row in members], [wanted[row] for row in members], scorer.device)
            for members in batches
        ]

    @torch.no_grad()
    def outputs(self) -> list[torch.Tensor]:
        """What the model says at the wanted places, [n, width] for some of them each: logits, or where logits are only
        a linear function of hidden states, these."""
        compute = self._scorer.hidden if self._linear else self._scorer.all_logits
        with sdpa_kernel(SDPBackend.MATH), _plain_experts(self._scorer.model):
            return [compute(rows) for rows in self._rows]

    def predicted(self, outputs: Iterable[torch.Tensor], changes: Iterable[torch.Tensor]) -> float:
        """Mean over the places of the divergence that changes of these outputs cause, to second order; nats."""
        return self._mean(
            quadratic(self._logits(out), self._logits(change, of_change=True), self._temperature)
            for out, change in _chunks(outputs, changes)
        )

    def realised(self, before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> float:
        """Mean over the places of KL(before ‖ after), over the whole vocabulary; nats."""
        return self._mean(
            divergence(self._logits(old), self._logits(new), self._temperature) for old, new in _chunks(before, after)
        )

    def _logits(self, outputs: torch.Tensor, *, of_change: bool = False) -> torch.Tensor:
        if not self._linear:
            return outputs
        head, wide = self._scorer.head, torch.promote_types(outputs.dtype, torch.float32)
        return plain_logits(outputs.to(wide), head.weight, None if of_change else head.bias)  # type: ignore[arg-type]

    def _mean(self, values: Iterable[torch.Tensor]) -> float:
        return math.fsum(float(each.sum()) for each in values) / self.places


@contextmanager
def _plain_experts(model: Any) -> Iterator[None]:
    """Fused experts, as transformers has them, one after the other instead of by a grouped product."""
    chosen = getattr(model.config, "_experts_implementation", None)
    if chosen in (None, "eager"):
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)


def _chunks(*outputs: Iterable[torch.Tensor]) -> Iterable[tuple[torch.Tensor, ...]]:
    return chain.from_iterable(
        zip(*(each.split(CHUNK) for each in together), strict=True) for together in zip(*outputs, strict=True)
    )

"""A step as a transaction, whatever computes the model: what the trainer backends share.

Gradients are accumulated over all micro-batches first; only when the loss and the gradient's norm are finite do the
weights and the optimiser move. So a step that raises, or is skipped, leaves both bit for bit as they were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import TrainerConfig
from async_rl.schema import ConfigError
from async_rl.trainer_config import rate_key
from trainer.algorithm.loss import partial_loss
from trainer.algorithm.metrics import ratio_metrics
from trainer.algorithm.ratios import k3_of
from trainer.algorithm.reference_kl import partial_penalty
from trainer.algorithm.tokens import TokenData
from trainer.backend import Sample, StepResult
from trainer.flat_batch import Batch, flatten, unflatten
from trainer.learnable import Learnable
from trainer.minibatches import split_groups
from trainer.route_rows import by_sequence

if TYPE_CHECKING:
    from trainer.step_control.control import StepControl


def penalises_distance(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss has the distance to the base model in it."""
    return algorithm.reference_kl != "none" and algorithm.reference_kl_place == "loss"


def check_centering(algorithm: AlgorithmConfig, vocabulary: int) -> None:
    """Raises ConfigError where scores are to be centred over more tokens than the model has."""
    if algorithm.center_scores > vocabulary:
        raise ConfigError(
            f"[algorithm] center_scores = {algorithm.center_scores}: the model's vocabulary has {vocabulary} "
            "tokens, so at most these"
        )


class Accumulated(NamedTuple):
    """The batch's loss, on how many of its trained tokens that depends (without the distance to the reference), and the
    log-probability of each [n] under the policy, and under the reference where the loss needs it. `routes` of each
    sample, as in `Sample`, where the pass was to record them; None of one that does not train."""

    loss: float
    learning: int
    proximal: torch.Tensor
    reference: torch.Tensor | None
    routes: list[npt.NDArray[np.int16] | None] | None = None


class Update(NamedTuple):
    """One optimiser step: its loss, its gradient's norm (0: nothing was moved), what was computed before it, and what
    the control of its length has to say."""

    loss: float
    norm: float
    before: Accumulated
    control: dict[str, float]


class Gathered:
    """What a pass over a batch's micro-batches collects, each at the places of its own tokens: what `Accumulated` has,
    as tensors that several ranks can sum. `reference` is None where the loss needs none. With router_replay = "trainer"
    a pass over `samples` that have no routes yet records them: `put_routes`, else `routes` is None."""

    def __init__(self, samples: Sequence[Sample], batch: Batch, algorithm: AlgorithmConfig) -> None:
        behaviour = batch.data.behaviour
        self._batch = batch
        self._algorithm = algorithm
        self.proximal = torch.zeros_like(behaviour)
        self.asks_reference = penalises_distance(algorithm) and batch.reference is None
        self.reference = torch.zeros_like(behaviour) if self.asks_reference else batch.reference
        self.total = torch.zeros((), dtype=torch.float64, device=behaviour.device)
        self.learning = torch.zeros((), dtype=torch.int64, device=behaviour.device)
        self._samples = samples
        records = algorithm.router_replay == "trainer" and all(sample.routes is None for sample in samples)
        self.routes: list[npt.NDArray[np.int16] | None] | None = [None] * len(samples) if records else None

    def put_routes(self, samples: Sequence[int], flat: npt.NDArray[np.int16], spans: Sequence[tuple[int, int]]) -> None:
        """Where the tokens of a micro-batch went: `flat` int16 [tokens, layers, k], with those of each of its samples
        at a span (start, length)."""
        assert self.routes is not None
        lengths = [len(self._samples[index].tokens) for index in samples]
        for index, each in zip(samples, by_sequence(flat, spans, lengths), strict=True):
            self.routes[index] = each

    def put_reference(self, where: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Log-probabilities under the base model, before `loss` asks for them."""
        assert self.reference is not None
        self.reference[where] = logprobs

    def loss(self, current: torch.Tensor, data: TokenData, where: torch.Tensor) -> torch.Tensor:
        """The part of the batch's loss that a micro-batch has; `current` [n] are its log π_θ, `data` what else there is
        to know of its tokens, `where` their places in the batch: int64 [n]."""
        coefficients = self._batch.coefficients[where]
        loss = partial_loss(current, data, coefficients, self._algorithm)
        if loss.requires_grad:
            self.learning += torch.autograd.grad(loss, current, retain_graph=True)[0].count_nonzero()
        if self.reference is not None:
            reference = self.reference[where]
            loss = loss + partial_penalty(current, reference, data.behaviour, coefficients, self._algorithm)
        self.total += loss.detach()
        self.proximal[where] = current.detach()
        return loss

    def accumulated(self) -> Accumulated:
        return Accumulated(float(self.total), int(self.learning), self.proximal, self.reference, self.routes)


class Stepping(ABC):
    """`trainer.backend.Backend.step` over what a backend has: the configuration, the sizes and the place of what is
    flat, what learns, and the control of a step's length where there is one."""

    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    vocabulary_size: int
    device: torch.device
    dtype: torch.dtype
    learnable: Learnable
    control: StepControl | None

    @property
    def modules(self) -> tuple[str, ...]:
        return self.learnable.modules

    @abstractmethod
    def _accumulate(self, samples: Sequence[Sample], batch: Batch) -> Accumulated:
        """One pass over the batch. Gradients are accumulated when they are enabled."""

    def _replay_metrics(self, samples: Sequence[Sample], batch: Batch) -> dict[str, float]:
        """`replay_missing`, the share of the experts' choices that no route told and the live router made, and
        `replay_changed` and `replay_changed_tokens` (trainer.replay_torch.Replay.metrics); {} without router replay."""
        return {}

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        """See the contract. Metrics: `loss`, `grad_norm` (before clipping; of a sketch, its own), `learning_rate` or
        `update_ratio`, those of `ratio_metrics`, `learning_fraction` (the share of tokens with an advantage, with a
        loss of one's own of all tokens, that move the policy: neither gated nor beyond a clip), with a reference in the
        loss `reference_kl`, the mean k3 of the policy against it, with centred scores `top_mass`, the mean probability
        of the sampler's likeliest tokens together, with router replay those of `_replay_metrics`, and those of step
        control. A skipped batch moves nothing, not even
        by weight decay, but its metrics and proximal log-probabilities are real.
        Raises AsyncRLError for a sample that cannot be trained, naming its attempt.

        With trainer.updates_per_batch above 1 a pass without gradient comes first, for the proximal log-probabilities;
        then the parts of the batch are trained one after the other, each with denominators of its own. `loss` and
        `grad_norm` are their means."""
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"{rate_key(self.trainer)} {rate}: must be finite and at least 0")
        batch = self._flatten(samples)
        if self.trainer.updates_per_batch == 1:
            updates = [self._update(samples, batch, rate)]
            before = updates[0].before
        else:
            with torch.no_grad():
                before = self._accumulate(samples, batch)
            if before.routes is not None:
                samples = [
                    sample._replace(routes=routes) for sample, routes in zip(samples, before.routes, strict=True)
                ]
            updates = self._updates(samples, batch, before, rate)
        loss, norm = (math.fsum(values) / len(updates) for values in list(zip(*updates, strict=True))[:2])
        metrics = {"loss": loss, "grad_norm": norm, rate_key(self.trainer): rate} | _means(
            each.control for each in updates
        )
        metrics |= ratio_metrics(before.proximal, batch.data, self.algorithm)
        judged = batch.n_tokens if self.algorithm.loss else int(batch.data.advantage.count_nonzero())
        metrics["learning_fraction"] = sum(each.before.learning for each in updates) / judged if judged else 1.0
        if batch.top is not None and batch.n_tokens:
            metrics["top_mass"] = float(batch.top.weights.double().sum(1).mean())
        if before.reference is not None and batch.n_tokens:
            metrics["reference_kl"] = float(k3_of((before.reference - before.proximal).double()).mean())
        metrics |= self._replay_metrics(samples, batch)
        return StepResult(metrics, unflatten(samples, batch, before.proximal), skipped=norm == 0)

    def _updates(self, samples: Sequence[Sample], whole: Batch, before: Accumulated, rate: float) -> list[Update]:
        """One update for each part of the batch, or none: when one raises, weights, optimiser and control go back."""
        restore, control = self.learnable.snapshot(), self.control and self.control.state()
        updates = []
        try:
            for places in split_groups(samples, self.trainer.updates_per_batch):
                part = [samples[place] for place in places]
                theirs = whole.places_of(places)
                batch = self._flatten(part)
                data = batch.data._replace(proximal=before.proximal[theirs])
                reference = None if before.reference is None else before.reference[theirs]
                updates.append(self._update(part, batch._replace(data=data, reference=reference), rate))
        except BaseException:
            restore()
            if self.control is not None and control is not None:
                self.control.restore(control)
            raise
        return updates

    def _update(self, samples: Sequence[Sample], batch: Batch, rate: float) -> Update:
        self.learnable.zero()
        # With every advantage 0, and no distance to pay for, so is the gradient: only log-probabilities matter.
        # A loss of one's own may learn from something else.
        penalised = penalises_distance(self.algorithm) and self.algorithm.reference_kl_weight > 0
        other = penalised or bool(self.algorithm.loss)
        learns = batch.n_tokens > 0 and (other or bool(batch.data.advantage.any()))
        try:
            with torch.set_grad_enabled(learns):
                before = self._accumulate(samples, batch)
            norm = self.learnable.norm() if learns else 0.0
            if not (math.isfinite(before.loss) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"after {self.learnable.steps} optimiser steps: loss {before.loss}, gradient norm {norm}; weights "
                    "and optimiser are unchanged"
                )
            control = self._move(norm, rate, samples) if norm > 0 else {}
        finally:
            self.learnable.zero()
        return Update(before.loss, norm, before, control)

    def _flatten(self, samples: Sequence[Sample]) -> Batch:
        return flatten(samples, self.algorithm, self.vocabulary_size, self.dtype, self.device)

    def _move(self, norm: float, rate: float, samples: Sequence[Sample]) -> dict[str, float]:
        """Take the step, as long as the optimiser makes it or as the control allows; its metrics."""
        metrics = {}
        if self.control is not None:
            metrics = self.control.step(self.learnable, norm, rate, samples)
        else:
            self.learnable.move(norm, rate)
        return metrics | self.learnable.metrics()


def _means(of_updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each number over those that have it."""
    found: dict[str, list[float]] = {}
    for numbers in of_updates:
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}

"""The torch backend: one Hugging Face causal language model on one device. What of it learns, and by which optimiser,
is its kind's (trainer/learnable.py).

A step is a transaction. Gradients are accumulated over all micro-batches first; only when the loss and the gradient's
norm are finite do the weights and the optimiser move. So a step that raises, or is skipped, leaves both bit for bit as
they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.schema import ConfigError
from async_rl.trainer_config import rate_key
from trainer.activation_checkpointing import checkpoint_layers
from trainer.algorithm.custom import load_loss
from trainer.algorithm.loss import partial_loss
from trainer.algorithm.metrics import ratio_metrics
from trainer.algorithm.ratios import k3_of
from trainer.algorithm.reference_kl import partial_penalty
from trainer.algorithm.tokens import TokenData, floored
from trainer.backend import Sample, StepResult
from trainer.canary import Canary
from trainer.flat_batch import Batch, flatten, unflatten
from trainer.kinds import make_learnable
from trainer.logprobs import Rows, Scorer, vocabulary_size
from trainer.lora import adapter_off
from trainer.lora_weights import LoraWeights
from trainer.minibatches import split_groups
from trainer.model_loading import load_model, resolve_device
from trainer.push_sizes import push_sizes

if TYPE_CHECKING:
    from trainer.step_control.control import StepControl

CONTROL_FILE = "step_control.json"


class Accumulated(NamedTuple):
    """The batch's loss, on how many of its trained tokens that depends (without the distance to the reference), and the
    log-probability of each [n] under the policy, and under the reference where the loss needs it."""

    loss: float
    learning: int
    proximal: torch.Tensor
    reference: torch.Tensor | None


class Update(NamedTuple):
    """One optimiser step: its loss, its gradient's norm (0: nothing was moved), what was computed before it, and what
    the control of its length has to say."""

    loss: float
    norm: float
    before: Accumulated
    control: dict[str, float]


class TorchBackend:
    """`trainer.backend.Backend` in plain torch.

    `temperature` is that of sampling: logits are divided by it in the loss, because behaviour log-probabilities are
    those of the distribution that was sampled from. `dtype` is the model's ("float32", "bfloat16", "float16"); an
    adapter and its optimiser are float32. `device` is "auto", "cpu" or "cuda"; `steps`, how many optimiser steps
    the run takes, is what the budget of step control is spread over. `model`, if given, is taken as it is in place of
    the one at `model_path`. Raises AsyncRLError."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        seed: int,
        dtype: str = "float32",
        device: str = "auto",
        steps: int = 1,
        model: PreTrainedModel | None = None,
    ) -> None:
        refuse_several_ranks()
        if algorithm.loss:
            load_loss(algorithm.loss)  # what cannot be imported is said before a model is loaded
        self.trainer = trainer
        self.algorithm = algorithm
        self.temperature = temperature
        self.model_path = str(model_path)
        self.device = resolve_device(device)
        self.model = load_model(model_path, dtype) if model is None else model
        self.model.to(self.device)  # type: ignore[arg-type]
        # No dropout: the policy that is trained must be the one that is served.
        self.model.eval()
        self.push_sizes = push_sizes(self.model, trainer)
        self.learnable = make_learnable(self.model, trainer, seed, self.model_path)
        self.scorer = Scorer(self.model, trainer.packing)
        if trainer.activation_checkpointing:
            checkpoint_layers(self.model)
        self.vocabulary_size = vocabulary_size(self.model)
        if algorithm.center_scores > self.vocabulary_size:
            raise ConfigError(
                f"[algorithm] center_scores = {algorithm.center_scores}: the model's vocabulary has "
                f"{self.vocabulary_size} tokens, so at most these"
            )
        self._dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        self.control = _step_control(self, steps)

    @property
    def modules(self) -> tuple[str, ...]:
        return self.learnable.modules

    @property
    def publishes_canary(self) -> bool:
        return isinstance(self.learnable, LoraWeights)

    # --- learning ----------------------------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        """See the contract. Metrics: `loss`, `grad_norm` (before clipping; of a sketch, its own), `learning_rate` or
        `update_ratio`, those of `ratio_metrics`, `learning_fraction` (the share of tokens with an advantage, with a
        loss of one's own of all tokens, that move the policy: neither gated nor beyond a clip), with a reference in the
        loss `reference_kl`, the mean k3 of the policy against it, with centred scores `top_mass`, the mean probability
        of the sampler's likeliest tokens together, and those of step control. A skipped batch moves nothing, not even
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
        penalised = self._reference_in_loss and self.algorithm.reference_kl_weight > 0
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
        return flatten(samples, self.algorithm, self.vocabulary_size, self._dtype, self.device)

    def _forward(self, rows: Rows, batch: Batch, where: torch.Tensor) -> tuple[torch.Tensor, TokenData]:
        """log π_θ of a micro-batch's tokens [n], and what else the loss knows of them."""
        data = batch.data.at(where)
        if batch.top is None:
            return floored(self.scorer.logprobs(rows, self.temperature)), data
        current, expected = self.scorer.logprobs_and_mean(rows, batch.top.at(where), self.temperature)
        return floored(current), data._replace(expected=expected)

    def _accumulate(self, samples: Sequence[Sample], batch: Batch) -> Accumulated:
        """Gradients are accumulated when they are enabled."""
        proximal = torch.zeros_like(batch.data.behaviour)
        asked = self._reference_in_loss and batch.reference is None
        reference = torch.zeros_like(proximal) if asked else batch.reference
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        learning = torch.zeros((), dtype=torch.int64, device=self.device)
        for rows, where in self._micro_batches(samples, batch):
            if asked and reference is not None:
                reference[where] = self._reference_logprobs(rows)
            current, data = self._forward(rows, batch, where)
            coefficients = batch.coefficients[where]
            loss = partial_loss(current, data, coefficients, self.algorithm)
            if loss.requires_grad:
                learning += torch.autograd.grad(loss, current, retain_graph=True)[0].count_nonzero()
            if reference is not None:
                loss = loss + partial_penalty(current, reference[where], data.behaviour, coefficients, self.algorithm)
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
            proximal[where] = current.detach()
        return Accumulated(float(total), int(learning), proximal, reference)

    def _micro_batches(self, samples: Sequence[Sample], batch: Batch) -> Iterator[tuple[Rows, torch.Tensor]]:
        """Each micro-batch, and the places of its trained tokens among the batch's: int64 [n]."""
        lengths = [int(places[-1]) for places in batch.wanted]
        attempts = [samples[row].attempt for row in batch.rows]
        for members in self.scorer.split(lengths, attempts, self.trainer.micro_batch_tokens):
            tokens = [samples[batch.rows[row]].tokens for row in members]
            rows = self.scorer.rows(tokens, [batch.wanted[row] for row in members])
            ranges = [np.arange(batch.start[row], batch.start[row + 1]) for row in members]
            yield rows, torch.from_numpy(np.concatenate(ranges)).to(self.device)

    @property
    def _reference_in_loss(self) -> bool:
        return self.algorithm.reference_kl != "none" and self.algorithm.reference_kl_place == "loss"

    @torch.no_grad()
    def _reference_logprobs(self, rows: Rows) -> torch.Tensor:
        with adapter_off(self.model):
            return floored(self.scorer.logprobs(rows, self.temperature))

    def _move(self, norm: float, rate: float, samples: Sequence[Sample]) -> dict[str, float]:
        """Take the step, as long as the optimiser makes it or as the control allows; its metrics."""
        metrics = {}
        if self.control is not None:
            metrics = self.control.step(self.learnable, norm, rate, samples)
        else:
            self.learnable.move(norm, rate)
        return metrics | self.learnable.metrics()

    def observe(self, divergence: float) -> None:
        if self.control is not None:
            self.control.observe(divergence)

    # --- reading -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reference(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        if not self.learnable.has_base:
            raise AsyncRLError(
                f'[trainer] kind = "{self.trainer.kind}" has changed the base model: it has no reference'
            )
        batch = self._flatten(samples)
        flat = torch.zeros_like(batch.data.behaviour)
        for rows, where in self._micro_batches(samples, batch):
            flat[where] = self._reference_logprobs(rows)
        return unflatten(samples, batch, flat)

    @torch.no_grad()
    def logprobs(
        self, tokens: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        out = [np.zeros(max(len(sequence) - 1, 0), dtype=np.float32) for sequence in tokens]
        long = [index for index, sequence in enumerate(tokens) if len(sequence) > 1]
        lengths = [len(tokens[index]) - 1 for index in long]
        for members in self.scorer.split(lengths, range(len(long)), self.trainer.micro_batch_tokens):
            places = [np.arange(1, lengths[row] + 1) for row in members]
            rows = self.scorer.rows([tokens[long[row]] for row in members], places)
            values = self.scorer.logprobs(rows, temperature).float().cpu().numpy()
            ends = np.cumsum([lengths[row] for row in members])
            for row, part in zip(members, np.split(values, ends[:-1]), strict=True):
                out[long[row]][:] = part
        return out

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        return self.learnable.export(path)

    def export_whole(self, path: Path) -> str:
        return self.learnable.export_whole(path)

    def canary(self, path: Path, seed: int, tokens: Sequence[npt.NDArray[np.int32]]) -> Canary:
        if not isinstance(self.learnable, LoraWeights):
            raise AsyncRLError(f'[trainer] kind = "{self.trainer.kind}" publishes no canary')
        return self.learnable.canary(path, seed, partial(self.logprobs, tokens))

    def export_final(self, folder: Path) -> None:
        self.learnable.export_final(folder)

    def save(self, folder: Path) -> None:
        """The learnable's files, and step_control.json where steps are controlled, in an existing folder."""
        self.learnable.save(folder)
        if self.control is not None:
            (folder / CONTROL_FILE).write_bytes(msgspec.json.encode(self.control.state()))

    def load(self, folder: Path) -> None:
        """Go on exactly where `save` was called. Nothing changes when it raises AsyncRLError: for files that are
        missing or broken, or that belong to another configuration. Control that was off until then begins anew."""
        if self.control is None or not (folder / CONTROL_FILE).exists():
            self.learnable.load(folder)
            return
        before = self.control.state()
        try:
            self.control.restore(_read_control(folder / CONTROL_FILE))
            self.learnable.load(folder)
        except BaseException as error:
            self.control.restore(before)
            if isinstance(error, msgspec.ValidationError):
                raise AsyncRLError(f"checkpoint file {folder / CONTROL_FILE}: cannot be read: {error}") from error
            raise


def _step_control(backend: TorchBackend, steps: int) -> StepControl | None:
    """What trainer.step_control asks for."""
    config = backend.trainer.step_control
    if config is None:
        return None
    from trainer.step_control.control import StepControl

    return StepControl(config, backend.scorer, backend.temperature, steps)


def _read_control(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise AsyncRLError(f"checkpoint file {path}: cannot be read: {error}") from error


def _means(of_updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each number over those that have it."""
    found: dict[str, list[float]] = {}
    for numbers in of_updates:
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def refuse_several_ranks() -> None:
    """Raises AsyncRLError in a process group of several ranks: each would take steps by its own gradients."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if (ranks := torch.distributed.get_world_size()) > 1:
        raise AsyncRLError(
            f"the trainer runs in a torch.distributed group of {ranks} ranks, and backend torch trains on one: "
            "start it as a single process (not with torchrun)"
        )

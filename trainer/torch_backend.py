"""The torch backend: one Hugging Face causal language model on one device. What of it learns, and by which optimiser,
is its kind's (trainer/learnable.py); how it moves, trainer/stepping.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from trainer.activation_checkpointing import checkpoint_layers
from trainer.algorithm.custom import load_loss
from trainer.algorithm.tokens import TokenData, floored
from trainer.backend import Sample, StepResult
from trainer.canary import Canary
from trainer.flat_batch import Batch, unflatten
from trainer.kinds import make_learnable
from trainer.learnable import Learnable
from trainer.logprobs import PAD, Rows, Scorer, vocabulary_size
from trainer.lora import adapter_off
from trainer.lora_weights import LoraWeights
from trainer.model_loading import load_model, resolve_device
from trainer.push_sizes import push_sizes
from trainer.replay_torch import Replay
from trainer.route_rows import missing_share
from trainer.stepping import Accumulated, Gathered, Stepping, check_centering

if TYPE_CHECKING:
    from trainer.step_control.control import StepControl

CONTROL_FILE = "step_control.json"
Result = TypeVar("Result")


class TorchBackend(Stepping):
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
        device: str | torch.device = "auto",
        steps: int = 1,
        model: PreTrainedModel | None = None,
    ) -> None:
        self._check_world(trainer)
        if algorithm.loss:
            load_loss(algorithm.loss)  # what cannot be imported is said before a model is loaded
        self.trainer = trainer
        self.algorithm = algorithm
        self.temperature = temperature
        self.model_path = str(model_path)
        self.device = resolve_device(device)
        self.model = load_model(model_path, dtype) if model is None else model
        # No dropout: the policy that is trained must be the one that is served.
        self.model.eval()
        self.push_sizes = push_sizes(self.model, trainer)
        self.learnable = self._put_in_place(seed)
        self.replay = Replay(self.model) if algorithm.router_replay != "none" else None
        self.scorer = self._within(lambda: Scorer(self.model, trainer.packing, self.replay))
        if trainer.activation_checkpointing:
            checkpoint_layers(self.model, self.replay.again if self.replay else nullcontext)
        self.vocabulary_size = vocabulary_size(self.model)
        check_centering(algorithm, self.vocabulary_size)
        self.dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        self.control = _step_control(self, steps)

    @property
    def publishes_canary(self) -> bool:
        return isinstance(self.learnable, LoraWeights)

    # --- where it is computed, which is another matter on several ranks (trainer.fsdp.backend) ------------------------

    def _check_world(self, trainer: TrainerConfig) -> None:
        refuse_several_ranks()

    def _put_in_place(self, seed: int) -> Learnable:
        """The model to its device, and what learns onto it."""
        self.model.to(self.device)  # type: ignore[arg-type]
        return make_learnable(self.model, self.trainer, seed, self.model_path)

    def _within(self, compute: Callable[[], Result]) -> Result:
        """`compute`, which calls the model, where all of its weights are there."""
        return compute()

    def _split(self, lengths: Sequence[int], attempts: Sequence[int]) -> list[list[int]]:
        """Rows of these lengths as micro-batches; an empty one is computed, too, and counts for nothing."""
        return self.scorer.split(lengths, attempts, self.trainer.micro_batch_tokens)

    def _put_together(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place, where each rank has put what it computed into zeros."""

    def _backward(self, loss: torch.Tensor, current: torch.Tensor) -> None:
        if loss.requires_grad:
            loss.backward()

    # --- learning ----------------------------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        if self.replay is not None:
            self.replay.forget()  # what `reference`, or a step that failed, has left
        return super().step(samples, rate)

    def _forward(self, rows: Rows, batch: Batch, where: torch.Tensor) -> tuple[torch.Tensor, TokenData]:
        """log π_θ of a micro-batch's tokens [n], and what else the loss knows of them. Of an empty one [1]."""
        data = batch.data.at(where)
        if batch.top is None or not len(where):
            return floored(self._logprobs_of(rows, self.temperature)), data
        top = batch.top.at(where)
        current, expected = self._within(lambda: self.scorer.logprobs_and_mean(rows, top, self.temperature))
        return floored(current), data._replace(expected=expected)

    def _accumulate(self, samples: Sequence[Sample], batch: Batch) -> Accumulated:
        gathered = Gathered(samples, batch, self.algorithm)
        for rows, where, members in self._micro_batches(samples, batch):
            if gathered.asks_reference:
                gathered.put_reference(where, self._reference_logprobs(rows)[: len(where)])
            with self._recording(gathered, rows, members):
                current, data = self._forward(rows, batch, where)
            loss = gathered.loss(current, data, where) if len(where) else current.new_zeros(())
            self._backward(loss, current)
        found = [gathered.total, gathered.learning, gathered.proximal]
        self._put_together([*found, gathered.reference] if gathered.asks_reference else found)
        return gathered.accumulated()

    @contextmanager
    def _recording(self, gathered: Gathered, rows: Rows, members: Sequence[int]) -> Iterator[None]:
        """Where this pass is to find the routes of the next ones: those of the one forward within."""
        if gathered.routes is None or self.replay is None:
            yield
            return
        recorded: list[torch.Tensor] = []
        with self.replay.recording(recorded):
            yield
        gathered.put_routes(members, recorded[0].cpu().numpy(), rows.spans)

    def _replay_metrics(self, samples: Sequence[Sample], batch: Batch) -> dict[str, float]:
        if self.replay is None:
            return {}
        lengths = [int(places[-1]) for places in batch.wanted]
        missing = missing_share([samples[row].routes for row in batch.rows], lengths, self.replay.layers)
        return {"replay_missing": missing} | self.replay.metrics()

    def _micro_batches(
        self, samples: Sequence[Sample], batch: Batch
    ) -> Iterator[tuple[Rows, torch.Tensor, Sequence[int]]]:
        """Each micro-batch, the places of its trained tokens among the batch's, int64 [n], and which samples it has."""
        lengths = [int(places[-1]) for places in batch.wanted]
        attempts = [samples[row].attempt for row in batch.rows]
        tokens = [samples[index].tokens for index in batch.rows]
        routes = [samples[index].routes for index in batch.rows] if self.replay else []
        for members in self._split(lengths, attempts):
            rows, where = self._rows(members, tokens, batch.wanted, batch.start, routes)
            yield rows, where, [batch.rows[row] for row in members]

    def _rows(
        self,
        members: Sequence[int],
        tokens: Sequence[npt.NDArray[np.int32]],
        wanted: Sequence[npt.NDArray[np.intp]],
        start: npt.NDArray[np.int64],
        routes: Sequence[npt.NDArray[np.int16] | None] = (),
    ) -> tuple[Rows, torch.Tensor]:
        """A micro-batch of these sequences, and the places of its wanted tokens in the flat arrays, in which those of
        each sequence begin at `start`. Without any sequence it is one of padding, whose only token has no place."""
        if not members:
            nothing = self.scorer.rows([np.full(2, PAD, np.int32)], [np.array([1])])
            return nothing, torch.zeros(0, dtype=torch.int64, device=self.device)
        theirs = [routes[row] for row in members] if routes else ()
        rows = self.scorer.rows([tokens[row] for row in members], [wanted[row] for row in members], theirs)
        where = np.concatenate([np.arange(start[row], start[row + 1]) for row in members])
        return rows, torch.from_numpy(where).to(self.device)

    @torch.no_grad()
    def _reference_logprobs(self, rows: Rows) -> torch.Tensor:
        with adapter_off(self.model):
            return floored(self._logprobs_of(rows, self.temperature))

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
        for rows, where, _ in self._micro_batches(samples, batch):
            flat[where] = self._reference_logprobs(rows)[: len(where)]
        self._put_together([flat])
        return unflatten(samples, batch, flat)

    @torch.no_grad()
    def logprobs(
        self, tokens: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        long = [sequence for sequence in tokens if len(sequence) > 1]
        wanted = [np.arange(1, len(sequence)) for sequence in long]
        lengths = [len(places) for places in wanted]
        start = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        flat = torch.zeros(int(start[-1]), dtype=self.dtype, device=self.device)
        for members in self._split(lengths, range(len(long))):
            rows, where = self._rows(members, long, wanted, start)
            flat[where] = self._logprobs_of(rows, temperature)[: len(where)].to(self.dtype)
        self._put_together([flat])
        ends = np.cumsum([max(len(sequence) - 1, 0) for sequence in tokens])
        return np.split(flat.float().cpu().numpy(), ends[:-1]) if len(tokens) else []

    def _logprobs_of(self, rows: Rows, temperature: float) -> torch.Tensor:
        return self._within(lambda: self.scorer.logprobs(rows, temperature))

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


def refuse_several_ranks() -> None:
    """Raises AsyncRLError in a process group of several ranks: each would take steps by its own gradients."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if (ranks := torch.distributed.get_world_size()) > 1:
        raise AsyncRLError(
            f"the trainer runs in a torch.distributed group of {ranks} ranks, and backend torch trains on one: "
            "start it as a single process (not with torchrun)"
        )

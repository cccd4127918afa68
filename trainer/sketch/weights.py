"""Kind "sketch": the linear layers' own weights learn, by gradient sketches; nothing of a weight's size is made.

A step goes: sketches S become directions D where they lie (RowAdam), the update ratio gives the length k, k·D becomes
integers, and these are applied, here as on every receiver, to the same bits. Norms and biases are frozen, a thousandth
of the weights. So are embeddings and head, which no factors could carry, unless trainer.train_embeddings: then they
learn by AdamW, and every policy is published whole.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import distributed
from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.update_file import Step as PolicyStep
from async_rl.policy.update_file import Storage, weights_digest, write_base, write_snapshot
from async_rl.schema import ConfigError
from trainer import optimizer_state
from trainer.adamw import AdamW, Deltas
from trainer.learnable import Proposal
from trainer.sketch import saved
from trainer.sketch.applying import take_step, warn_of_noise
from trainer.sketch.attach import attach_sketches, table
from trainer.sketch.chain import Chain, read_link
from trainer.sketch.ratio import weight_energy
from trainer.sketch.step import Memory, Step, Tangents, check_momentum, directions_, encoded, length, redraw
from trainer.whole_model import all_parameters, fill, write_whole

log = logging.getLogger("trainer")

STORAGE: dict[torch.dtype, Storage] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class SketchWeights:
    """`trainer.learnable.Learnable`. `seed` draws the projections. Weights are float32, or bfloat16 with stochastic
    rounding (`rounding_noise`, ‖noise‖ / ‖update‖ of the last step, says at what price; None in float32).

    Of the sketches' optimiser the state moves with the weights, in `take`: what is only proposed leaves it, though not
    the sketches, as it was. That of embeddings (AdamW) moves when a step is proposed. Raises AsyncRLError, and
    ConfigError for a running mean that would outgrow everything."""

    has_base = False

    def __init__(self, model: PreTrainedModel, trainer: TrainerConfig, seed: int, model_path: str) -> None:
        self.model = model
        self.trainer = trainer
        self.model_path = model_path
        self.blocks, self.sketches, self.projections = attach_sketches(model, trainer, seed)
        log.info("sketches:\n%s", table(self.blocks))
        self.storage = storage_of(self.parameters)
        self.rounds = self.storage == "bfloat16"
        check_momentum(trainer, self.blocks)
        self.embeddings = _embeddings(model, trainer)
        self.modules = tuple(sorted(self.parameters))
        self.steps = 0
        self.rounding_noise: float | None = None
        views = self.sketches.views
        self.memory = Memory(
            {name: torch.zeros_like(view[..., 0]) for name, view in views.items()},
            {name: torch.zeros_like(view) for name, view in views.items()} if trainer.momentum else {},
        )
        self.energy = self._weight_energy()
        self.chain = Chain(seed, self.storage, lambda: weights_digest(self.parameters))
        self._snapshots: list[weakref.ref[_Snapshot]] = []

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """All of the model's, tied ones once, as they are stored."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    # --- moving ------------------------------------------------------------------------------------------------------

    def zero(self) -> None:
        self.sketches.zero()
        if self.embeddings:
            self.embeddings.zero()

    def reduce(self, group: distributed.ProcessGroup | None = None) -> None:
        """With several ranks, after the backward passes and before `norm`: see `Sketches.reduce`. Every rank sums the
        same tensors, also one whose part of the batch was empty: the others would wait for it."""
        self.sketches.reduce(group)
        for parameter in self.embeddings.parameters.values() if self.embeddings else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad, group=group)

    def norm(self) -> float:
        """The gradient's, on average: E‖G Aᵀ‖² = ‖G‖²."""
        return math.hypot(self.sketches.norm(), self.embeddings.norm() if self.embeddings else 0.0)

    def propose(self, norm: float, rate: float) -> Proposal:
        """The sketches are used up: they hold the directions until `zero`."""
        views, trainer = self.sketches.views, self.trainer
        if self.steps == 0:
            self._warn_of_silence()
        memory = directions_(views, self.memory, self.steps + 1, trainer.beta2, trainer.momentum)
        size = length(views, self.blocks, self.projections, rate, self.energy)
        factors = encoded(views, size)
        dense: Deltas = {}
        if self.embeddings:
            learning_rate = trainer.learning_rate * rate / trainer.update_ratio  # one schedule for both
            dense = self.embeddings.displacement(self.embeddings.norm(), learning_rate)
        return Proposal(Tangents(self.blocks, factors, self.projections), dense, Step(size, factors, memory))

    @torch.no_grad()
    def take(self, proposal: Proposal, scale: float) -> None:
        step: Step = proposal.own
        factors = step.factors if scale == 1 else encoded(self.sketches.views, scale * step.size)
        for reference in self._snapshots:
            if (kept := reference()) is not None:
                kept.keep_weights()
        if self.trainer.publish == "factors":
            self.chain.before_moving()
        self.rounding_noise = take_step(self.blocks, factors, self.projections, self.steps)
        self.energy = self._weight_energy()
        if self.embeddings:
            self.embeddings.add(dict(proposal.dense), scale)
        if self.trainer.publish == "factors":
            self.chain.take(PolicyStep(self.steps, self.projections.update, factors))
        self.memory = step.memory
        self.steps += 1
        redraw(self.projections, self.blocks, self.memory, self.trainer, self.steps)
        warn_of_noise(self.rounding_noise, self.steps)

    def move(self, norm: float, rate: float) -> None:
        self.take(self.propose(norm, rate), 1)

    def metrics(self) -> dict[str, float]:
        return {} if self.rounding_noise is None else {"rounding_noise": self.rounding_noise}

    def _warn_of_silence(self) -> None:
        """Some models (Mamba, for dt_proj) use a layer's weight without calling the layer."""
        silent = [name for name, view in self.sketches.views.items() if view.dim() == 2 and not view.any()]
        if silent:
            log.warning(
                "no gradient reaches %s (%d of %d projections): the model computes with the weight, and does not call "
                "the layer; it will not learn",
                silent[0],
                len(silent),
                len(self.blocks),
            )

    def _weight_energy(self) -> torch.Tensor:
        """‖W‖² of all that is sketched."""
        return torch.stack([weight_energy(block.weight) for block in self.blocks.values()]).sum()

    def snapshot(self) -> Callable[[], None]:
        """Weights are copied only when they are about to move while the function is still held: to the CPU, where
        there is room for them."""
        kept = _Snapshot(self)
        self._snapshots = [reference for reference in self._snapshots if reference() is not None]
        self._snapshots.append(weakref.ref(kept))
        return kept.restore

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        if self.trainer.publish == "factors":
            return self.chain.export(path, self.steps)
        if not self.steps:
            return write_base(path, weights_digest(self.parameters))
        return write_snapshot(path, self.parameters, None, self.steps)

    def export_whole(self, path: Path) -> str:
        if self.trainer.publish == "snapshots":
            return write_snapshot(path, self.parameters, None, self.steps)
        if not self.chain.exported:
            raise AsyncRLError(f"{path}: the weights have moved since the last export, whose policy this is to be")
        return write_snapshot(path, self.parameters, self.chain.digest, self.steps)

    def export_final(self, folder: Path) -> None:
        write_whole(folder, self.model, self.model_path)

    def save(self, folder: Path) -> None:
        """See `trainer.sketch.saved`; and optimizer.safetensors, for embeddings that learn."""
        if self.embeddings:
            optimizer_state.write_moments(folder, self.embeddings.parameters, self.embeddings.optimizer)
        draw = saved.Draw(self.projections.base_seed, self.projections.update)
        saved.write(folder, self.parameters, self.memory, draw, self.steps, self.model_path)
        if self.trainer.publish == "factors":
            self.chain.save(folder / saved.UPDATE_FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        found = saved.read(folder, self.parameters, self.memory, self.projections.base_seed)
        factors = self.trainer.publish == "factors"
        link = read_link(folder / saved.UPDATE_FILE, self.sketches.flat.device) if factors else None
        if self.embeddings:
            part = {name: found.weights[name] for name in self.embeddings.parameters}
            optimizer_state.restore(folder, part, self.embeddings.parameters, self.embeddings.optimizer)
        fill(self.model, found.weights)
        for own, read in zip(self.memory, found.memory, strict=True):
            for name, tensor in own.items():
                tensor.copy_(read[name])
        self.steps = found.steps
        self.projections.draw(found.draw.step)
        self.energy = self._weight_energy()
        if link is not None:
            self.chain.restore((link.parent, None, link.steps))


class _Snapshot:
    """See `SketchWeights.snapshot`."""

    def __init__(self, weights: SketchWeights) -> None:
        self._of = weights
        self._weights: dict[str, torch.Tensor] | None = None
        self._memory = Memory(*({name: tensor.clone() for name, tensor in part.items()} for part in weights.memory))
        self._steps, self._drawn = weights.steps, weights.projections.update
        self._energy, self._noise = weights.energy, weights.rounding_noise
        self._chain = weights.chain.kept()
        self._restore_embeddings = weights.embeddings.snapshot() if weights.embeddings else None

    def keep_weights(self) -> None:
        if self._weights is None:
            self._weights = {name: block.weight.to("cpu", copy=True) for name, block in self._of.blocks.items()}

    @torch.no_grad()
    def restore(self) -> None:
        own = self._of
        for name, weight in (self._weights or {}).items():
            own.blocks[name].weight.copy_(weight)
        for part, kept in zip(own.memory, self._memory, strict=True):
            part.update({name: tensor.clone() for name, tensor in kept.items()})
        own.steps, own.energy, own.rounding_noise = self._steps, self._energy, self._noise
        own.projections.draw(self._drawn)
        own.chain.restore(self._chain)
        if self._restore_embeddings:
            self._restore_embeddings()


def _embeddings(model: PreTrainedModel, trainer: TrainerConfig) -> AdamW | None:
    """Embeddings and head (one, if they are tied), once they learn."""
    if not trainer.train_embeddings:
        return None
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    wanted = {id(layer.weight) for layer in layers if layer is not None}
    parameters = {name: each for name, each in all_parameters(model).items() if id(each) in wanted}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return AdamW(parameters, trainer)


def storage_of(parameters: Mapping[str, torch.Tensor]) -> Storage:
    """Raises ConfigError for weights that are not kept."""
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1 or not dtypes <= STORAGE.keys():
        raise ConfigError(
            '[model] dtype: [trainer] kind = "sketch" keeps weights in float32 or bfloat16, all of them alike, and '
            f"this model has {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
        )
    return STORAGE[dtypes.pop()]

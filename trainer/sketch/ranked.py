"""Kind "sketch" over ranks: each rank sketches what it computes and moves what it holds; rank 0 decides the step.

Sketches are small beside the weights. So they are put together on rank 0, where a step is made of them by the code of
one process (trainer/sketch/step.py), and only its integers go to all ranks. Rank 0 alone keeps the optimiser's state
and the chain of policies, and writes the files of one process, which receivers, and any number of ranks, read.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.factors import Factors
from async_rl.policy.tensor_file import read_header, read_tensors
from async_rl.policy.update_file import Step as PolicyStep
from async_rl.policy.update_file import Storage, weights_digest, write_base, write_snapshot
from trainer.optimizer_state import WEIGHTS_FILE
from trainer.ranks import agreement
from trainer.sketch import saved
from trainer.sketch.applying import warn_of_noise
from trainer.sketch.attach import table
from trainer.sketch.blocks import Block
from trainer.sketch.chain import Chain, Link, read_link
from trainer.sketch.projections import Projections
from trainer.sketch.step import Memory, Step, Tensors, check_momentum, directions_, encoded, length, redraw

log = logging.getLogger("trainer")


class SummedSketches(Protocol):
    """What the ranks have sketched of their own tokens."""

    def zero(self) -> None: ...

    def reduce(self) -> None:
        """Make each rank's parts whole, once between two calls of `zero`."""

    def norm(self) -> float:
        """Of all sketches, after `reduce`; the same number on every rank."""


class RankedSketches(ABC):
    """`trainer.learnable.Learnable`, but for what step control needs of one; every method is called on all ranks at
    once. `blocks` are whole ones, of which the weights' shapes matter alone; `like` are all parameters as one process
    has them, on device meta; `projections` are those of one process. `memory` and `chain` are rank 0's. Raises
    AsyncRLError, and ConfigError as `trainer.sketch.weights.SketchWeights` does."""

    has_base = False
    sketches: SummedSketches

    def __init__(
        self,
        trainer: TrainerConfig,
        model_path: str,
        device: torch.device,
        blocks: dict[str, Block],
        like: dict[str, torch.Tensor],
        projections: Projections,
        storage: Storage = "float32",
    ) -> None:
        self.trainer = trainer
        self.model_path = model_path
        self.device = device
        self.blocks = blocks
        self.projections = projections
        self.rounds = storage == "bfloat16"
        self._like = like
        check_momentum(trainer, blocks)
        self._first = dist.get_rank() == 0
        if self._first:
            log.info("sketches:\n%s", table(blocks))
        self.modules = tuple(sorted(like))
        self.steps = 0
        self.rounding_noise: float | None = None
        self.memory = _no_memory(blocks if self._first else {}, trainer, device)
        self.energy = self._weight_energy()
        self._base = ""  # the digest of the weights before the first step, once it is known
        self.chain = Chain(projections.base_seed, storage, lambda: self._base)

    # --- what lies on the ranks --------------------------------------------------------------------------------------

    def zero(self) -> None:
        self.sketches.zero()

    def norm(self) -> float:
        """Of all sketches; the same number on every rank. Each rank's parts are made whole first, once between two
        calls of `zero`."""
        self.sketches.reduce()
        return self.sketches.norm()

    @abstractmethod
    def collect(self) -> Tensors:
        """After `norm`: on rank 0 every block's whole sketch, which may be written to until `zero`."""

    @abstractmethod
    def _apply(self, factors: Mapping[str, Factors]) -> float | None:
        """Take the step of these factors, whole, on this rank's parts. With weights in bfloat16 how large the rounding
        is, of all ranks (`trainer.sketch.applying.take_step`)."""

    @abstractmethod
    def _energy(self) -> torch.Tensor:
        """‖W‖² of what is sketched and counts on this rank: float64, without axes."""

    @abstractmethod
    def _moving(self) -> Sequence[torch.Tensor]:
        """Views of this rank's parts of what is sketched."""

    @abstractmethod
    def _whole(self) -> dict[str, torch.Tensor]:
        """All parameters on rank 0, on the CPU."""

    @abstractmethod
    def _fill(self, whole: Mapping[str, torch.Tensor]) -> None:
        """This rank's parts, from all parameters (views of a file)."""

    # --- moving ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def move(self, norm: float, rate: float) -> None:
        step = self._step(rate)
        if self.trainer.publish == "factors":
            self._know_base()
        self.rounding_noise = self._apply(step.factors)
        self.energy = self._weight_energy()
        if self._first and self.trainer.publish == "factors":
            self.chain.before_moving()
            self.chain.take(PolicyStep(self.steps, self.projections.update, step.factors))
        self.memory = step.memory
        self.steps += 1
        redraw(self.projections, self.blocks, self.memory, self.trainer, self.steps)
        if self._first:
            warn_of_noise(self.rounding_noise, self.steps)

    def _step(self, rate: float) -> Step:
        """What rank 0 makes of all sketches: its factors, whole, on every rank. Nothing has changed when it raises."""
        error, step = None, Step(0.0, {}, Memory({}, {}))
        views = self.collect()
        try:
            if self._first:
                trainer = self.trainer
                memory = directions_(views, self.memory, self.steps + 1, trainer.beta2, trainer.momentum)
                size = length(views, self.blocks, self.projections, rate, self.energy)
                step = Step(size, encoded(views, size), memory)
        except Exception as raised:
            error = raised
        agreement.agree(error, "making a step of the sketches", self.device)
        return step._replace(factors=_from_rank_0(step.factors, self.blocks, self.device))

    def metrics(self) -> dict[str, float]:
        return {} if self.rounding_noise is None else {"rounding_noise": self.rounding_noise}

    def _weight_energy(self) -> torch.Tensor:
        """‖W‖² of all that is sketched, on every rank."""
        total = self._energy()
        dist.all_reduce(total)
        return total

    def snapshot(self) -> Callable[[], None]:
        """Weights that move are copied to the CPU, where there is room for them."""
        moving = self._moving()
        weights = [local.to("cpu", copy=True) for local in moving]
        memory = Memory(*({name: tensor.clone() for name, tensor in part.items()} for part in self.memory))
        steps, drawn, energy, chain = self.steps, self.projections.update, self.energy, self.chain.kept()
        noise = self.rounding_noise

        @torch.no_grad()
        def restore() -> None:
            for local, kept in zip(moving, weights, strict=True):
                local.copy_(kept)
            self.memory = Memory(*({name: tensor.clone() for name, tensor in part.items()} for part in memory))
            self.steps, self.energy, self.rounding_noise = steps, energy, noise
            self.projections.draw(drawn)
            self.chain.restore(chain)

        return restore

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        self._know_base()
        if self.trainer.publish == "factors":
            return self._on_rank_0(lambda: self.chain.export(path, self.steps), f"writing {path}")
        if not self.steps:
            return self._on_rank_0(lambda: write_base(path, self._base), f"writing {path}")
        return self.export_whole(path)

    def export_whole(self, path: Path) -> str:
        self._know_base()
        tensors = self._whole()

        def write() -> str:
            digest = None
            if self.trainer.publish == "factors":
                if not self.chain.exported:
                    raise AsyncRLError(f"{path}: the weights have moved since the last export, whose policy this is")
                digest = self.chain.digest
            return write_snapshot(path, tensors, digest, self.steps)

        return self._on_rank_0(write, f"writing {path}")

    @abstractmethod
    def export_final(self, folder: Path) -> None: ...

    def save(self, folder: Path) -> None:
        """The files of one process: see `trainer.sketch.saved`."""
        self._know_base()
        tensors = self._whole()

        def write() -> str:
            draw = saved.Draw(self.projections.base_seed, self.projections.update)
            saved.write(folder, tensors, self.memory, draw, self.steps, self.model_path)
            if self.trainer.publish == "factors":
                self.chain.save(folder / saved.UPDATE_FILE)
            return ""

        self._on_rank_0(write, f"writing checkpoint {folder}")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """See the contract; of a checkpoint of any number of ranks, or of one process. Rank 0 checks it, and every rank
        reads its parts of the weights, from a folder that all of them see."""
        error, link, whole = None, None, {}
        counters = torch.zeros(2, dtype=torch.int64, device=self.device)
        try:
            if self._first:
                found = saved.read(folder, self._like, self.memory, self.projections.base_seed)
                link = self._read_link(folder)
                counters.copy_(torch.tensor([found.steps, found.draw.step]))
                whole = found.weights
            else:
                whole = read_tensors(folder / WEIGHTS_FILE, read_header(folder / WEIGHTS_FILE))
        except Exception as raised:
            error = raised
        agreement.agree(error, f"reading checkpoint {folder}", self.device)
        self._fill(whole)
        if self._first:
            for own, read in zip(self.memory, found.memory, strict=True):
                for name, tensor in own.items():
                    tensor.copy_(read[name])
        dist.broadcast(counters, 0)
        self.steps, drawn = counters.tolist()
        self.projections.draw(drawn)
        self.energy = self._weight_energy()
        if link is not None:
            self.chain.restore((link.parent, None, link.steps))

    def _read_link(self, folder: Path) -> Link | None:
        if self.trainer.publish != "factors":
            return None
        return read_link(folder / saved.UPDATE_FILE, self.device)

    def _know_base(self) -> None:
        """Before the first step: the digest of the weights, which takes all of them."""
        if self.steps or self._base:
            return
        tensors = self._whole()
        self._base = self._on_rank_0(lambda: weights_digest(tensors), "hashing the weights")

    def _on_rank_0(self, make: Callable[[], str], what: str) -> str:
        return agreement.on_rank_0(make, what, self.device)


def _no_memory(blocks: Mapping[str, Block], trainer: TrainerConfig, device: torch.device) -> Memory:
    shapes = {name: block.sketch_shape for name, block in blocks.items()}
    variance = {name: torch.zeros(shape[:-1], device=device) for name, shape in shapes.items()}
    mean = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()} if trainer.momentum else {}
    return Memory(variance, mean)


def _from_rank_0(
    factors: Mapping[str, Factors], blocks: Mapping[str, Block], device: torch.device
) -> dict[str, Factors]:
    """Rank 0's factors, of all blocks or of none, on every rank."""
    there = torch.tensor(int(bool(factors)), device=device)
    dist.broadcast(there, 0)
    if not there:
        return {}
    shapes = {name: block.sketch_shape for name, block in blocks.items()}
    rows = [math.prod(shape[:-1]) for shape in shapes.values()]
    numbers = [math.prod(shape) for shape in shapes.values()]
    q = torch.empty(sum(numbers), dtype=torch.int16, device=device)
    s = torch.empty(sum(rows), dtype=torch.float32, device=device)
    if factors:
        torch.cat([factors[name].q.flatten() for name in shapes], out=q)
        torch.cat([factors[name].s.flatten() for name in shapes], out=s)
    dist.broadcast(q.view(torch.uint8), 0)  # gloo knows no int16
    dist.broadcast(s, 0)
    return {
        name: Factors(own_q.view(shape), own_s.view(shape[:-1]))
        for (name, shape), own_q, own_s in zip(shapes.items(), q.split(numbers), s.split(rows), strict=True)
    }

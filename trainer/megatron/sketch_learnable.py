"""Kind "sketch" under Megatron: each rank sketches what it computes and moves what it holds; rank 0 decides the step.

Sketches are small beside the weights. So they are put together on rank 0, where a step is made of them by the code of
one process (trainer/sketch/step.py), and only its integers go to all ranks. Rank 0 alone keeps the optimiser's state
and the chain of policies, and writes the files of the torch backend, which receivers, and either backend, read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.factors import Factors
from async_rl.policy.tensor_file import read_header, read_tensors
from async_rl.policy.update_file import Step as PolicyStep
from async_rl.policy.update_file import weights_digest, write_base, write_snapshot
from trainer.megatron import collect, whole_weights
from trainer.megatron.learnable import make_plan, skeleton
from trainer.megatron.merge import write_whole
from trainer.megatron.model import ShardedModel
from trainer.megatron.pieces import pieces as base_pieces
from trainer.megatron.sketching import ShardedSketches
from trainer.optimizer_state import WEIGHTS_FILE
from trainer.sketch import saved
from trainer.sketch.attach import find_blocks, table
from trainer.sketch.blocks import Block
from trainer.sketch.chain import Chain, Link, read_link
from trainer.sketch.ratio import weight_energy
from trainer.sketch.sketches import Sketches
from trainer.sketch.step import Memory, Step, check_momentum, directions_, encoded, length, redraw
from trainer.targets import Target

log = logging.getLogger("trainer")


class SketchShards:
    """`trainer.learnable.Learnable`, but for what step control needs of one; every method is called on all ranks at
    once. Weights are float32. `seed` draws the projections, which are the torch backend's. `memory` and `chain` are
    rank 0's. Raises AsyncRLError, and ConfigError as `trainer.sketch.weights.SketchWeights` does."""

    has_base = False
    rounds = False

    def __init__(self, model: ShardedModel, trainer: TrainerConfig, seed: int, model_path: str) -> None:
        self.model = model
        self.trainer = trainer
        self.model_path = model_path
        whole = skeleton(model.config).to(torch.float32)
        self._like = {name: parameter.detach() for name, parameter in whole.named_parameters()}
        self.blocks = find_blocks(whole, trainer)
        check_momentum(trainer, self.blocks)
        self._first = dist.get_rank() == 0
        if self._first:
            log.info("sketches:\n%s", table(self.blocks))
        plan = make_plan(model, _modules(self.blocks), trainer)
        self.sketches = ShardedSketches(model, plan, dist.get_rank(), seed, trainer.ranks)
        self.projections = self.sketches.projections
        self.modules = tuple(sorted(self._like))
        self.steps = 0
        self.memory = _no_memory(self.blocks if self._first else {}, trainer, model.device)
        self.energy = self._weight_energy()
        self._base = ""  # the digest of the weights before the first step, once it is known
        self.chain = Chain(seed, "float32", lambda: self._base)

    # --- moving ------------------------------------------------------------------------------------------------------

    def zero(self) -> None:
        self.sketches.zero()

    def norm(self) -> float:
        """Of all sketches; the same number on every rank. Each rank's parts are made whole first, once between two
        calls of `zero`."""
        self.sketches.reduce()
        return self.sketches.norm()

    @torch.no_grad()
    def move(self, norm: float, rate: float) -> None:
        step = self._step(rate)
        if self.trainer.publish == "factors":
            self._know_base()
        self.sketches.apply(_by_module(step.factors))
        self.energy = self._weight_energy()
        if self._first and self.trainer.publish == "factors":
            self.chain.before_moving()
            self.chain.take(PolicyStep(self.steps, self.projections.update, step.factors))
        self.memory = step.memory
        self.steps += 1
        redraw(self.projections, self.blocks, self.memory, self.trainer, self.steps)

    def _step(self, rate: float) -> Step:
        """What rank 0 makes of all sketches: its factors, whole, on every rank. Nothing has changed when it raises."""
        error, step = None, Step(0.0, {}, Memory({}, {}))
        shapes = {name: block.sketch_shape for name, block in self.blocks.items()} if self._first else {}
        views = Sketches(shapes, self.model.device).views
        self.sketches.gather(views)
        try:
            if self._first:
                trainer = self.trainer
                memory = directions_(views, self.memory, self.steps + 1, trainer.beta2, trainer.momentum)
                size = length(views, self.blocks, self.projections, rate, self.energy)
                step = Step(size, encoded(views, size), memory)
        except Exception as raised:
            error = raised
        collect.agree(error, "making a step of the sketches", self.model.device)
        return step._replace(factors=_from_rank_0(step.factors, self.blocks, self.model.device))

    def metrics(self) -> dict[str, float]:
        return {}

    def _weight_energy(self) -> torch.Tensor:
        """‖W‖² of all that is sketched, on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for piece in base_pieces(self.model):
            if piece.owned and piece.name.removesuffix(".weight") in self.sketches.blocks:
                total += weight_energy(piece.local.reshape(piece.size))
        dist.all_reduce(total)
        return total

    def snapshot(self) -> Callable[[], None]:
        """Weights that move are copied to the CPU, where there is room for them."""
        moving = [
            piece.local for piece in base_pieces(self.model)
            if piece.name.removesuffix(".weight") in self.sketches.blocks
        ]  # fmt: skip
        weights = [local.to("cpu", copy=True) for local in moving]
        memory = Memory(*({name: tensor.clone() for name, tensor in part.items()} for part in self.memory))
        steps, drawn, energy, chain = self.steps, self.projections.update, self.energy, self.chain.kept()

        @torch.no_grad()
        def restore() -> None:
            for local, kept in zip(moving, weights, strict=True):
                local.copy_(kept)
            self.memory = Memory(*({name: tensor.clone() for name, tensor in part.items()} for part in memory))
            self.steps, self.energy = steps, energy
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
        tensors = whole_weights.gather(self.model, self._like)

        def write() -> str:
            digest = None
            if self.trainer.publish == "factors":
                if not self.chain.exported:
                    raise AsyncRLError(f"{path}: the weights have moved since the last export, whose policy this is")
                digest = self.chain.digest
            return write_snapshot(path, tensors, digest, self.steps)

        return self._on_rank_0(write, f"writing {path}")

    def export_final(self, folder: Path) -> None:
        write_whole(self.model, folder, self.model_path)

    def save(self, folder: Path) -> None:
        """The files of the torch backend: see `trainer.sketch.saved`."""
        self._know_base()
        tensors = whole_weights.gather(self.model, self._like)

        def write() -> str:
            draw = saved.Draw(self.projections.base_seed, self.projections.update)
            saved.write(folder, tensors, self.memory, draw, self.steps, self.model_path)
            if self.trainer.publish == "factors":
                self.chain.save(folder / saved.UPDATE_FILE)
            return ""

        self._on_rank_0(write, f"writing checkpoint {folder}")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """See the contract; of a checkpoint of any layout, or of the torch backend. Rank 0 checks it, and every rank
        reads its parts of the weights, from a folder that all of them see."""
        error, link, whole = None, None, {}
        counters = torch.zeros(2, dtype=torch.int64, device=self.model.device)
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
        collect.agree(error, f"reading checkpoint {folder}", self.model.device)
        whole_weights.fill(self.model, whole)
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
        return read_link(folder / saved.UPDATE_FILE, self.model.device)

    def _know_base(self) -> None:
        """Before the first step: the digest of the weights, which takes all of them."""
        if self.steps or self._base:
            return
        tensors = whole_weights.gather(self.model, self._like)
        self._base = self._on_rank_0(lambda: weights_digest(tensors), "hashing the weights")

    def _on_rank_0(self, make: Callable[[], str], what: str) -> str:
        return collect.on_rank_0(make, what, self.model.device)


def _modules(blocks: Mapping[str, Block]) -> tuple[Target, ...]:
    """Every projection that is sketched, of experts each one's, by path."""
    found = []
    for name, block in blocks.items():
        *experts, rows, columns = block.weight.shape
        path, _, last = name.rpartition(".")
        paths = [f"{path}.{expert}.{last}" for expert in range(experts[0])] if experts else [name]
        found += [Target(each, rows, columns) for each in paths]
    return tuple(sorted(found))


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


def _by_module(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Of experts each one's own, by its path."""
    found = {}
    for name, each in factors.items():
        if each.q.dim() == 2:
            found[name] = each
            continue
        path, _, last = name.rpartition(".")
        for expert, (q, s) in enumerate(zip(each.q, each.s, strict=True)):
            found[f"{path}.{expert}.{last}"] = Factors(q, s)
    return found

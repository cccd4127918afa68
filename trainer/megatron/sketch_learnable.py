"""Kind "sketch" under Megatron: what lies on a rank of a layout, for `trainer.sketch.ranked`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config import TrainerConfig
from async_rl.policy.factors import Factors
from trainer.megatron import whole_weights
from trainer.megatron.learnable import make_plan, skeleton
from trainer.megatron.merge import write_whole
from trainer.megatron.model import ShardedModel
from trainer.megatron.pieces import Piece
from trainer.megatron.pieces import pieces as base_pieces
from trainer.megatron.sketching import ShardedSketches
from trainer.sketch.attach import find_blocks
from trainer.sketch.blocks import Block
from trainer.sketch.ranked import RankedSketches
from trainer.sketch.ratio import weight_energy
from trainer.sketch.sketches import Sketches
from trainer.sketch.step import Tensors
from trainer.targets import Target


class SketchShards(RankedSketches):
    """See there. Weights are float32. `seed` draws the projections, which are the torch backend's."""

    def __init__(self, model: ShardedModel, trainer: TrainerConfig, seed: int, model_path: str) -> None:
        self.model = model
        whole = skeleton(model.config).to(torch.float32)
        blocks = find_blocks(whole, trainer)
        plan = make_plan(model, _modules(blocks), trainer)
        self.sketches = ShardedSketches(model, plan, dist.get_rank(), seed, trainer.ranks)
        like = {name: parameter.detach() for name, parameter in whole.named_parameters()}
        super().__init__(trainer, model_path, model.device, blocks, like, self.sketches.projections)

    def collect(self) -> Tensors:
        shapes = {name: block.sketch_shape for name, block in self.blocks.items()} if self._first else {}
        views = Sketches(shapes, self.model.device).views
        self.sketches.gather(views)
        return views

    def _apply(self, factors: Mapping[str, Factors]) -> None:
        self.sketches.apply(_by_module(factors))

    def _energy(self) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for piece in self._sketched():
            if piece.owned:
                total += weight_energy(piece.local.reshape(piece.size))
        return total

    def _moving(self) -> Sequence[torch.Tensor]:
        return [piece.local for piece in self._sketched()]

    def _sketched(self) -> list[Piece]:
        blocks = self.sketches.blocks
        return [piece for piece in base_pieces(self.model) if piece.name.removesuffix(".weight") in blocks]

    def _whole(self) -> dict[str, torch.Tensor]:
        return whole_weights.gather(self.model, self._like)

    def _fill(self, whole: Mapping[str, torch.Tensor]) -> None:
        whole_weights.fill(self.model, whole)

    def export_final(self, folder: Path) -> None:
        write_whole(self.model, folder, self.model_path)


def _modules(blocks: Mapping[str, Block]) -> tuple[Target, ...]:
    """Every projection that is sketched, of experts each one's, by path."""
    found = []
    for name, block in blocks.items():
        *experts, rows, columns = block.weight.shape
        path, _, last = name.rpartition(".")
        paths = [f"{path}.{expert}.{last}" for expert in range(experts[0])] if experts else [name]
        found += [Target(each, rows, columns) for each in paths]
    return tuple(sorted(found))



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

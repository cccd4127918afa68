"""Kind "sketch" over FSDP2's ranks: each has some rows of every weight, and sums the sketches of its own tokens.

A layer is gathered whole to be computed, so a rank knows x and the output's gradient of its tokens as one process does:
P = x Aᵀ and S += gᵀ P are of those, and the sum over the ranks is the whole batch's sketch. Applied are rows of the
factors on the rows that a rank has, to the bits that one process stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.policy.factors import Factors
from trainer.fsdp.sharding import Rows, gather, rows_of, shard
from trainer.sketch.applying import Change, apply_step, noise_of
from trainer.sketch.attach import attach_sketches
from trainer.sketch.ranked import RankedSketches
from trainer.sketch.ratio import weight_energy
from trainer.sketch.step import Tensors
from trainer.sketch.weights import storage_of
from trainer.whole_model import write_whole


class ShardedSketch(RankedSketches):
    """See there. Weights are float32, or bfloat16 with stochastic rounding. `root` is the sharded model."""

    def __init__(
        self,
        model: PreTrainedModel,
        trainer: TrainerConfig,
        seed: int,
        model_path: str,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.model = model
        self.root = shard(model, mesh)
        attached = attach_sketches(model, trainer, seed)
        self.sketches = attached.sketches
        parameters = dict(model.named_parameters())
        like = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in parameters.items()}
        blocks = attached.blocks
        super().__init__(trainer, model_path, device, blocks, like, attached.projections, storage_of(parameters))

    def collect(self) -> Tensors:
        return self.sketches.views if self._first else {}

    def _apply(self, factors: Mapping[str, Factors]) -> float | None:
        change = Change(0.0, 0.0)
        for name in factors:
            local, first = self._rows(name)
            if len(local):
                own = Factors(*(part[first : first + len(local)] for part in factors[name]))
                block = self.blocks[name]._replace(weight=local)
                one = apply_step(block, own, self.projections, self.steps, first)
                change = Change(change.meant + one.meant, change.stored + one.stored)
        if not self.rounds:
            return None
        sums = torch.tensor(change, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return noise_of(Change(*sums.tolist()))

    def _energy(self) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for local in self._moving():
            if len(local):
                total += weight_energy(local)
        return total

    def _moving(self) -> Sequence[torch.Tensor]:
        return [self._rows(name).local for name in self.blocks]

    def _rows(self, name: str) -> Rows:
        return rows_of(self.model.get_parameter(f"{self.blocks[name].module}.weight"))

    def _whole(self) -> dict[str, torch.Tensor]:
        return gather(dict(self.model.named_parameters()))

    @torch.no_grad()
    def _fill(self, whole: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            local, first = rows_of(parameter)
            local.copy_(whole[name][first : first + len(local)])

    def export_final(self, folder: Path) -> None:
        tensors = self._whole()

        def write() -> str:
            write_whole(folder, self.model, self.model_path, tensors)
            return ""

        self._on_rank_0(write, f"writing {folder}")

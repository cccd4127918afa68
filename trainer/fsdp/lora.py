"""Kind "lora" over ranks: the base is cut, the adapter is not. Each rank has all of it and takes the same steps."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import policy_digest
from trainer.fsdp.sharding import shard
from trainer.lora_weights import LoraWeights
from trainer.ranks import agreement


class ReplicatedLora(LoraWeights):
    """`trainer.learnable.Learnable`; every method is called on all ranks at once. Files are those of one process,
    written by rank 0 and read by all. `root` is the sharded model."""

    def __init__(
        self,
        model: PreTrainedModel,
        trainer: TrainerConfig,
        seed: int,
        model_path: str,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        super().__init__(model, trainer, seed, model_path)
        self.device = device
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)
        self.root = shard(model, mesh, self.parameters.values())

    def norm(self) -> float:
        """Of the whole batch's gradient: each rank's part is summed first, once between two calls of `zero`. What no
        gradient reached on any rank has none afterwards."""
        reached = torch.tensor([float(each.grad is not None) for each in self.parameters.values()], device=self.device)
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters.values()]
        flat = torch.cat([reached.to(parts[0].dtype), *(part.flatten() for part in parts)])
        dist.all_reduce(flat)
        there, *sums = flat.split([len(parts), *(part.numel() for part in parts)])
        for parameter, ranks, whole in zip(self.parameters.values(), there.tolist(), sums, strict=True):
            parameter.grad = whole.view_as(parameter).clone() if ranks else None
        return super().norm() if any(there.tolist()) else 0.0

    def export(self, path: Path) -> str:
        return agreement.on_rank_0(lambda: LoraWeights.export(self, path), f"writing {path}", self.device)

    def export_final(self, folder: Path) -> None:
        def write() -> str:
            LoraWeights.export_final(self, folder)
            return ""

        agreement.on_rank_0(write, f"writing {folder}", self.device)

    def save(self, folder: Path) -> None:
        """Raises AsyncRLError where a rank's adapter is not rank 0's, as it has to be at all times, bit for bit."""
        own, error = policy_digest(self.parameters, self._config), None

        def write() -> str:
            LoraWeights.save(self, folder)
            return own

        if (written := agreement.on_rank_0(write, f"writing checkpoint {folder}", self.device)) != own:
            error = AsyncRLError(f"its adapter is {own[:16]}…, rank 0's {written[:16]}…: steps were not the same")
        agreement.agree(error, f"checkpoint {folder}", self.device)

    def load(self, folder: Path) -> None:
        """See the contract; of a checkpoint of any number of ranks, of one process or of backend "megatron"."""
        restore = self.snapshot()
        try:
            agreement.everywhere(
                lambda: LoraWeights.load(self, folder), f"reading checkpoint {folder}", self.device
            )
        except BaseException:
            restore()
            raise

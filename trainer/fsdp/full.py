"""Kind "full" over ranks: parameters, gradients and AdamW's moments are cut, each rank moves its own rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.policy.update_file import weights_digest, write_base, write_snapshot
from trainer.fsdp import saved
from trainer.fsdp.sharding import gather, shard
from trainer.full_weights import FullWeights
from trainer.optimizer_state import Counters, read_counters, write_counters
from trainer.ranks import agreement
from trainer.whole_model import write_whole


class ShardedFull(FullWeights):
    """`trainer.learnable.Learnable`; every method is called on all ranks at once. `parameters` are DTensors of which
    this rank has some rows. `root` is the sharded model."""

    def __init__(
        self,
        model: PreTrainedModel,
        trainer: TrainerConfig,
        seed: int,
        model_path: str,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.device = device
        self.root = shard(model, mesh)
        super().__init__(model, trainer, model_path)
        self._digest: tuple[int, str] | None = None  # steps, and the digest of the weights after them

    def norm(self) -> float:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    # --- files -------------------------------------------------------------------------------------------------------

    def export(self, path: Path) -> str:
        if self.steps:
            return self.export_whole(path)
        digest = self._weights_digest()
        return self._on_rank_0(lambda: write_base(path, digest), f"writing {path}")

    def export_whole(self, path: Path) -> str:
        tensors = gather(self.parameters)
        digest = self._on_rank_0(lambda: write_snapshot(path, tensors, None, self.steps), f"writing {path}")
        self._digest = self.steps, digest
        return digest

    def export_final(self, folder: Path) -> None:
        tensors = gather(self.parameters)

        def write() -> str:
            write_whole(folder, self.model, self.model_path, tensors)
            return ""

        self._on_rank_0(write, f"writing {folder}")

    def save(self, folder: Path) -> None:
        """backend.json, and shard-*.safetensors of each rank (trainer.fsdp.saved)."""
        counters = Counters(self.steps, self._weights_digest(), self.model_path, "full")

        def write() -> str:
            write_counters(folder, counters)
            return ""

        self._on_rank_0(write, f"writing checkpoint {folder}")
        saved.write(folder, saved.state_of(self.parameters, self.optimizer), self.device)

    def load(self, folder: Path) -> None:
        """See the contract; of a checkpoint of any number of ranks, or of one process."""

        def look() -> tuple[Counters, saved.State]:
            return read_counters(folder, "full"), saved.lay_out(folder, self.parameters)

        counters, state = agreement.everywhere(look, f"reading checkpoint {folder}", self.device)
        saved.fill(folder, state)
        digest = counters.digest
        self._check(folder, {name: state[name] for name in self.parameters}, digest)
        saved.restore(state, self.parameters, self.optimizer)
        self.steps = counters.optimizer_steps
        self._digest = self.steps, digest

    def _check(self, folder: Path, weights: dict[str, torch.Tensor], digest: str) -> None:
        tensors = gather(weights)
        self._on_rank_0(lambda: saved.check_digest(folder, tensors, digest), f"reading checkpoint {folder}")

    def _weights_digest(self) -> str:
        """On every rank; the weights are whole on rank 0 only for as long as this takes."""
        if self._digest is None or self._digest[0] != self.steps:
            tensors = gather(self.parameters)
            self._digest = self.steps, self._on_rank_0(lambda: weights_digest(tensors), "hashing the weights")
        return self._digest[1]

    def snapshot(self) -> Callable[[], None]:
        restore = super().snapshot()

        def back() -> None:
            restore()
            self._digest = None

        return back

    def _on_rank_0(self, make: Callable[[], str], what: str) -> str:
        return agreement.on_rank_0(make, what, self.device)

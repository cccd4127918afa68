"""The torch backend over the ranks of [trainer.parallel] data: the weights are cut (FSDP2), and so is every batch.

Every method is called on all ranks at once, with the same arguments (`trainer.ranks.leader` sees to that), and gives
all of them the same. Each rank computes its own part of a batch (`trainer.balance`), in as many micro-batches as the
others, with the denominators of the whole batch; so gradients only have to be summed, and what a pass found is put
together by adding flat arrays that are zero where another rank computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from async_rl.config import TrainerConfig
from async_rl.schema import ConfigError
from trainer.backend import Sample, StepResult
from trainer.balance import Dealer, attention_share
from trainer.flat_batch import Batch, flatten
from trainer.fsdp.full import ShardedFull
from trainer.fsdp.lora import ReplicatedLora
from trainer.fsdp.sharding import all_ranks
from trainer.fsdp.sketch import ShardedSketch
from trainer.learnable import Learnable
from trainer.torch_backend import Result, TorchBackend

LEARNABLES: dict[str, Any] = {"lora": ReplicatedLora, "full": ShardedFull, "sketch": ShardedSketch}


class FsdpBackend(TorchBackend):
    """`trainer.backend.Backend`. The arguments are those of `TorchBackend`, `device` is this rank's. torch.distributed
    has been brought up, with as many ranks as `trainer.parallel` has. Raises AsyncRLError."""

    def _check_world(self, trainer: TrainerConfig) -> None:
        if (world := dist.get_world_size()) != trainer.parallel.ranks:
            raise ConfigError(f"[trainer.parallel] data = {trainer.parallel.data}, but {world} ranks were started")

    def _put_in_place(self, seed: int) -> Learnable:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        mesh = all_ranks(self.device)
        self._dealer = Dealer(mesh.size(), self.trainer.micro_batch_tokens, _attention_share(self.model))
        kind = LEARNABLES[self.trainer.kind]
        learnable: Learnable = kind(self.model, self.trainer, seed, self.model_path, mesh, self.device)
        return learnable

    @cached_property
    def _rank(self) -> int:
        return dist.get_rank()

    def _within(self, compute: Callable[[], Result]) -> Result:
        result: Result = self.learnable.root(compute)  # type: ignore[attr-defined]
        return result

    def _split(self, lengths: Sequence[int], attempts: Sequence[int]) -> list[list[int]]:
        return self._dealer.deal(lengths, attempts, self._rank, padded=not self.scorer.packed)

    def _put_together(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _backward(self, loss: torch.Tensor, current: torch.Tensor) -> None:
        """On all ranks or on none: each layer waits for the others', whatever a rank has to learn from."""
        if current.requires_grad:
            (loss + 0 * current.sum()).backward()

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        """See `Stepping.step`. One more metric: `rank_imbalance`, what the busiest rank computed in units of the mean,
        in all passes of the step together."""
        self._dealer.begin()
        result = super().step(samples, rate)
        result.metrics["rank_imbalance"] = self._dealer.imbalance
        return result

    def _flatten(self, samples: Sequence[Sample]) -> Batch:
        return flatten(samples, self.algorithm, self.vocabulary_size, self.dtype, self.device, divided=False)


def _attention_share(model: PreTrainedModel) -> float:
    """Of a decoder layer. The width of attention is about that of the hidden states."""
    layer = next((each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)), model)
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    return attention_share(model.config.get_text_config(decoder=True).hidden_size, max(matrices, 1))

"""What publishing a version would take in other forms, so that a reader can compare."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from trainer.targets import TargetError, resolve_targets

ADAPTER_BYTES = 4  # an adapter is float32


class PushSizes(NamedTuple):
    """Bytes of tensors: of every parameter of the model in the dtype it is trained in, and of a LoRA adapter of
    trainer.rank on the same linear layers and experts (0 for a model that has none)."""

    full: int
    adapter: int


def push_sizes(model: PreTrainedModel, trainer: TrainerConfig) -> PushSizes:
    """Of `model` as it was loaded, before anything is put on it."""
    full = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    try:
        adapter = resolve_targets(model, trainer.targets).parameters(trainer.rank, trainer.expert_adapters)
    except TargetError:
        adapter = 0
    return PushSizes(full, adapter * ADAPTER_BYTES)

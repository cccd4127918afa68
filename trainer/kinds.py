"""The trainer kinds by name: what of the model learns. A new one is a file and an entry here; only the chosen one is
imported."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from trainer.learnable import Learnable


def _lora(model: PreTrainedModel, trainer: TrainerConfig, seed: int, model_path: str) -> Learnable:
    from trainer.lora_weights import LoraWeights

    return LoraWeights(model, trainer, seed, model_path)


def _sketch(model: PreTrainedModel, trainer: TrainerConfig, seed: int, model_path: str) -> Learnable:
    from trainer.sketch.weights import SketchWeights

    return SketchWeights(model, trainer, seed, model_path)


def _full(model: PreTrainedModel, trainer: TrainerConfig, seed: int, model_path: str) -> Learnable:
    from trainer.full_weights import FullWeights

    return FullWeights(model, trainer, model_path)


KINDS: dict[str, Callable[[PreTrainedModel, TrainerConfig, int, str], Learnable]] = {
    "lora": _lora,
    "sketch": _sketch,
    "full": _full,
}


def make_learnable(model: PreTrainedModel, trainer: TrainerConfig, seed: int, model_path: str) -> Learnable:
    """Put what learns on `model`, which is on its device, in place. `seed` is the run's, `model_path` the base's."""
    return KINDS[trainer.kind](model, trainer, seed, model_path)

"""The trainer backends by name; a new one is a file and an entry here. Only the chosen one's dependencies are
imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import Config
from trainer.backend import Backend


def _torch(config: Config, model_path: Path) -> Backend:
    from transformers.utils.logging import disable_progress_bar

    from trainer.torch_backend import TorchBackend

    disable_progress_bar()  # a trainer writes to a log
    return TorchBackend(
        model_path,
        trainer=config.trainer,
        algorithm=_with_length(config),
        temperature=config.inference.temperature,
        seed=config.run.seed,
        dtype=config.model.dtype,
        device=config.model.device,
        steps=config.run.steps * config.trainer.updates_per_batch,
    )


def _with_length(config: Config) -> AlgorithmConfig:
    """The algorithm, with what it takes from another section by default."""
    length = config.algorithm.aggregation_length or config.inference.max_new_tokens
    return msgspec.structs.replace(config.algorithm, aggregation_length=length)


BACKENDS: dict[str, Callable[[Config, Path], Backend]] = {"torch": _torch}


def make_backend(config: Config, model_path: Path) -> Backend:
    """Build the configured backend."""
    return BACKENDS[config.trainer.backend](config, model_path)

"""The trainer backends by name; a new one is a file and an entry here. Only the chosen one's dependencies are
imported."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.run.watchdog import Watchdog
from trainer.backend import Backend
from trainer.ranks.place import Place, check_devices, check_world, torchrun_place

if TYPE_CHECKING:
    import torch


def make_backend(config: Config, model_path: Path) -> Backend:
    """Backend "torch" alone, in this process."""
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


_ONE_PROCESS = (
    'torchrun started {} processes, and [trainer] backend = "torch" trains on one: start it without torchrun, or set '
    '[trainer.parallel] data = {}'
)


@contextmanager
def _torch(config: Config, model_path: Path, logs: Path | None, name: str) -> Iterator[Backend]:
    if config.trainer.parallel.ranks > 1:
        with _on_ranks(config, model_path, logs, name) as backend:
            yield backend
        return
    _refuse_torchrun(torchrun_place())
    yield make_backend(config, model_path)


def _refuse_torchrun(place: Place | None) -> None:
    if place is not None and place.world > 1:
        raise AsyncRLError(_ONE_PROCESS.format(place.world, place.world))


@contextmanager
def _on_ranks(config: Config, model_path: Path, logs: Path | None, name: str) -> Iterator[Backend]:
    from trainer.ranks.leader import leading

    with leading(config, model_path, build_rank(config, model_path), logs, name) as backend:
        yield backend


def build_rank(config: Config, model_path: Path) -> Callable[[Place], Backend]:
    """What makes the part of each rank, on all of them at once."""

    def build(place: Place) -> Backend:
        device = rank_device(config, place)
        make: Callable[..., Backend] = _RANKS[config.trainer.backend]()
        return make(
            model_path,
            trainer=config.trainer,
            algorithm=_with_length(config),
            temperature=config.inference.temperature,
            seed=config.run.seed,
            dtype=config.model.dtype,
            device=device,
        )

    return build


def _fsdp() -> Callable[..., Backend]:
    from transformers.utils.logging import disable_progress_bar

    from trainer.fsdp.backend import FsdpBackend

    disable_progress_bar()
    return FsdpBackend


def _megatron() -> Callable[..., Backend]:
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it says what parts of it that are not used found
    from trainer.megatron.backend import MegatronBackend

    return MegatronBackend


_RANKS: dict[str, Callable[[], Callable[..., Backend]]] = {"torch": _fsdp, "megatron": _megatron}


def rank_device(config: Config, place: Place) -> torch.device:
    """Where a rank computes; to be asked before megatron-core is imported. Raises AsyncRLError for more ranks than
    GPUs."""
    import torch

    from trainer.model_loading import resolve_device

    device = resolve_device(config.model.device)
    if device.type == "cuda":
        check_devices(place, torch.cuda.device_count())
        return torch.device("cuda", place.local)
    # Read when megatron-core is imported, whose small functions a compiler would take minutes for.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    return device


def follow_torchrun(config: Config, model_path: Path, place: Place, watchdog: Watchdog) -> None:
    """Of a rank that torchrun started, other than the first: all that it does. Raises AsyncRLError."""
    from trainer.ranks.follower import follow

    if config.trainer.backend == "torch" and config.trainer.parallel.ranks == 1:
        _refuse_torchrun(place)
    check_world(place, config.trainer.parallel)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, for all ranks: rank 0 needs this one for a checkpoint
    follow(config, place, build_rank(config, model_path), watchdog)


BACKENDS: dict[str, Callable[[Config, Path, Path | None, str], AbstractContextManager[Backend]]] = {
    "torch": _torch,
    "megatron": _on_ranks,
}


def open_backend(
    config: Config, model_path: Path, logs: Path | None = None, name: str = "trainer"
) -> AbstractContextManager[Backend]:
    """The configured backend, and every process that it takes, while the context is open; processes besides this one
    log to `logs`/`name`-….log, or to the terminal. Raises AsyncRLError."""
    return BACKENDS[config.trainer.backend](config, model_path, logs, name)

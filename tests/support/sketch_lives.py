"""The life of a backend of kind "sketch" on a tiny model, the same on one process and on the ranks of a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backend_ranks import SEED, TEMPERATURE, batch

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.policy.tensor_file import read_header, read_tensors
from trainer.backend import Backend

ALGORITHM: dict[str, Any] = {"treatment": "clip", "surrogate": "ppo", "aggregation": "prompt_mean"}
TRAINER: dict[str, Any] = {"kind": "sketch", "rank": 8, "update_ratio": 1e-3}
RATE = 1e-3
STEPS = 3


def make(kind: Callable[..., Backend], model: Path, trainer: dict[str, Any], device: Any) -> Any:
    return kind(
        model, trainer=TrainerConfig(**TRAINER | trainer), algorithm=AlgorithmConfig(**ALGORITHM),
        temperature=TEMPERATURE, seed=SEED, dtype="float32", device=device,
    )  # fmt: skip


def life(backend: Any, folder: Path) -> dict[str, Any]:
    """What a run asks of a backend, and what it says; files lie in `folder`."""
    learnable = backend.learnable
    out: dict[str, Any] = {"modules": backend.modules, "digests": [backend.export(folder / "v0")], "metrics": []}
    for number in range(STEPS):
        out["metrics"].append(backend.step(batch(backend, number), RATE).metrics)
        out["digests"].append(backend.export(folder / f"v{number + 1}"))
    out["whole"] = backend.export_whole(folder / "whole")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)  # every rank does so
    backend.save(checkpoint)
    samples = batch(backend, STEPS)
    back = learnable.snapshot()
    moved = [_step(backend, samples, folder) for _ in range(2)]
    back()
    undone = [_step(backend, samples, folder) for _ in range(2)]
    backend.load(checkpoint)
    again = backend.export(folder / "again")
    resumed = [_step(backend, samples, folder) for _ in range(2)]
    out["exact"] = (undone == moved, resumed == moved, again == out["digests"][-1], learnable.steps)
    nothing = backend.step([sample._replace(mask=np.ones_like(sample.mask)) for sample in samples], RATE)
    out["nothing"] = nothing.skipped, backend.export(folder / "still") == moved[-1][0]
    backend.export_final(folder / "final")
    backend.load(checkpoint)
    return out


def _step(backend: Any, samples: Any, folder: Path) -> tuple[str, dict[str, float]]:
    metrics = backend.step(samples, RATE).metrics
    return backend.export(folder / "moved"), metrics


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path, read_header(path))


# --- on the ranks ----------------------------------------------------------------------------------------------------


def live(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (model, folder, trainer, parallel, theirs): `life`, the sketches that steps were made of, and what
    is read of the folder of the torch backend's life, `theirs`."""
    from trainer.megatron import groups
    from trainer.megatron.backend import MegatronBackend

    out = []
    for case in payload:
        trainer = case["trainer"] | {"backend": "megatron", "parallel": ParallelConfig(**case["parallel"])}
        backend = make(MegatronBackend, Path(case["model"]), trainer, torch.device("cpu"))
        kept = _keep_sketches(backend.learnable)
        found = life(backend, Path(case["folder"]))
        said, *found["theirs"] = _read(backend, Path(case["theirs"]), Path(case["folder"]))
        out.append({"life": found, "kept": kept, "said": said})
        groups.end()
    return out


def _read(backend: Any, theirs: Path, folder: Path) -> tuple[str, str, int]:
    """The error for a broken checkpoint; the policy that a good one has, and its steps. The first changes nothing of
    what the second made."""
    backend.load(theirs / "checkpoint")
    digest = backend.export(folder / "theirs")
    try:
        backend.load(theirs / "broken")
    except AsyncRLError as error:
        backend.export_whole(folder / "unchanged")
        return str(error), digest, backend.learnable.steps
    raise AssertionError("a checkpoint that was cut short was read")


def _keep_sketches(learnable: Any) -> list[tuple[dict[str, Any], float]]:
    """From now on the sketches of every step, whole (on rank 0), and the weights' energy before it."""
    kept: list[tuple[dict[str, Any], float]] = []
    gather = learnable.sketches.gather

    def keeping(into: Mapping[str, torch.Tensor]) -> None:
        gather(into)
        kept.append(({name: each.numpy().copy() for name, each in into.items()}, float(learnable.energy)))
        assert math.isfinite(kept[-1][1])

    learnable.sketches.gather = keeping
    return kept

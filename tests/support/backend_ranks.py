"""A trainer backend's whole life on a tiny model, the same on one process and on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.parallel_config import ParallelConfig
from trainer.backend import Backend, Sample

VOCABULARY = 67
LENGTHS = (9, 14, 5, 23, 11, 7, 8)  # of the segments
ATTEMPTS = (0, 1, 2, 3, 3, 4, 5)  # the fourth has two
GROUPS = (0, 0, 0, 1, 1, 1, 2)
ALGORITHM: dict[str, Any] = {
    "treatment": "clip", "ratio_level": "sequence", "ratio_low": 0.5, "ratio_high": 1.5, "surrogate": "ppo",
    "aggregation": "prompt_mean", "reference_kl": "k3", "reference_kl_weight": 0.1,
}  # fmt: skip
TRAINER: dict[str, Any] = {"rank": 4, "alpha": 8.0, "learning_rate": 5e-3, "weight_decay": 0.01}
SEED = 3
TEMPERATURE = 0.7
RATE = 5e-3


def batch(backend: Backend, seed: int = 0) -> list[Sample]:
    """Sampled from a policy that is near the backend's: else a loss with bounds has no gradient but noise."""
    random = np.random.default_rng(seed)
    out = []
    for length, attempt, group in zip(LENGTHS, ATTEMPTS, GROUPS, strict=True):
        mask = np.ones(length, np.uint8)
        mask[length // 3 + 1 :] = 0
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        own = np.concatenate([[0.0], backend.logprobs([tokens], TEMPERATURE)[0]])
        behaviour = np.where(mask == 0, own + random.normal(0, 0.1, length), 0).astype(np.float32)
        ages = random.integers(0, 3, length).astype(np.int32)
        out.append(Sample(tokens, behaviour, mask, ages, float((-1) ** attempt * (1 + group)), attempt, group))
    return out


def life(backend: Backend, folder: Path) -> dict[str, Any]:
    """What a run asks of a backend, and what it says."""
    samples = batch(backend)
    some = [samples[0].tokens, samples[2].tokens[:1], samples[3].tokens]
    out: dict[str, Any] = {"fresh": backend.export(folder / "fresh"), "modules": backend.modules}
    out["sizes"] = tuple(backend.push_sizes)
    canary = backend.canary(folder / "canary", 5, some[::2])
    out["canary"], out["canary logprobs"], out["canary base"] = canary
    out["after the canary"] = backend.export(folder / "fresh")
    for number in range(2):
        result = backend.step(batch(backend, number), RATE)
        out[f"step {number}"], out[f"proximal {number}"] = result.metrics, result.proximal
    out["reference"] = backend.reference(samples)
    out["logprobs"] = backend.logprobs(some, TEMPERATURE)
    backend.save(folder)
    alone = backend.step(samples[:1], RATE)  # fewer attempts than copies of the model
    out["alone"] = alone.metrics
    digest = backend.export(folder / "moved")
    nothing = backend.step([sample._replace(mask=np.ones_like(sample.mask)) for sample in samples], RATE)
    out["nothing"] = nothing.skipped, backend.export(folder / "moved") == digest, [p.sum() for p in nothing.proximal]
    backend.load(folder)
    again = backend.step(samples[:1], RATE)
    out["again"] = again.metrics == alone.metrics, backend.export(folder / "moved") == digest
    return out


def make(kind: Callable[..., Backend], model: Path, trainer: dict[str, Any], device: Any) -> Backend:
    return kind(
        model, trainer=TrainerConfig(**TRAINER | trainer), algorithm=AlgorithmConfig(**ALGORITHM),
        temperature=TEMPERATURE, seed=SEED, dtype="float32", device=device,
    )  # fmt: skip


def same(one: Any, other: Any, tolerance: float, where: str = "") -> None:
    """Plain data with arrays in it; floats to `tolerance`, of the largest where there are several."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key], tolerance, f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs, tolerance, where)
    elif isinstance(one, (float, np.ndarray)):
        assert np.shape(one) == np.shape(other)
        gap, largest = (float(np.max(np.abs(values), initial=0.0)) for values in (np.asarray(one) - other, other))
        assert gap <= tolerance * max(1.0, largest), (where, one, other)
    else:
        assert one == other, where


# --- on the ranks ----------------------------------------------------------------------------------------------------


def live(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (model, folder, trainer, parallel): `life`."""
    from trainer.megatron import groups
    from trainer.megatron.backend import MegatronBackend

    out = []
    for case in payload:
        trainer = case["trainer"] | {"backend": "megatron", "parallel": ParallelConfig(**case["parallel"])}
        backend = make(MegatronBackend, Path(case["model"]), trainer, torch.device("cpu"))
        out.append(life(backend, Path(case["folder"])))
        groups.end()
    return out

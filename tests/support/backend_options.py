"""Steps of a trainer backend with what algorithms may ask for, the same on one process and on the ranks of a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from backend_ranks import RATE, SEED, TEMPERATURE, TRAINER, VOCABULARY, batch

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.parallel_config import ParallelConfig
from async_rl.top_tokens import TopTokens
from trainer.backend import Backend, Sample

LAYERS, EXPERTS, EACH = 4, 8, 2  # of the mixture of sharded_models
CENTRED: dict[str, Any] = {"surrogate": "policy_gradient", "treatment": "uncorrected", "center_scores": 3}


def steps(backend: Backend, algorithm: AlgorithmConfig) -> list[dict[str, Any]]:
    """Two steps: metrics and proximal log-probabilities of each."""
    out = []
    for number in range(2):
        samples = [_equipped(sample, algorithm, number) for sample in batch(backend, number)]
        result = backend.step(samples, RATE)
        out.append({"metrics": result.metrics, "proximal": result.proximal})
    return out


def _equipped(sample: Sample, algorithm: AlgorithmConfig, seed: int) -> Sample:
    """With likeliest tokens, and with routes: of its first tokens, of others unknown, of one sample none at all."""
    n = len(sample.tokens)
    random = np.random.default_rng((seed, n, sample.attempt))
    if k := algorithm.center_scores:
        ids = np.argsort(random.random((n, VOCABULARY)), axis=1)[:, :k].astype(np.int32)
        sample = sample._replace(top=TopTokens(ids, np.log(random.uniform(0.1, 0.3, (n, k))).astype(np.float32)))
    if algorithm.router_replay == "rollout" and sample.attempt != 2:
        routes = np.argsort(random.random((n, LAYERS, EXPERTS)), axis=2)[..., :EACH].astype(np.int16)
        routes[n - 3 :] = -1
        sample = sample._replace(routes=routes)
    return sample


def make(kind: Any, model: str, algorithm: AlgorithmConfig, trainer: dict[str, Any], device: Any) -> Backend:
    backend: Backend = kind(
        model, trainer=TrainerConfig(**TRAINER | trainer), algorithm=algorithm, temperature=TEMPERATURE, seed=SEED,
        dtype="float32", device=device,
    )  # fmt: skip
    return backend


# --- on the ranks ----------------------------------------------------------------------------------------------------


def stepped(payload: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """For each case (model, algorithm, trainer, parallel): `steps`."""
    from trainer.megatron import groups
    from trainer.megatron.backend import MegatronBackend

    out = []
    for case in payload:
        trainer = case["trainer"] | {"backend": "megatron", "parallel": ParallelConfig(**case["parallel"])}
        algorithm = AlgorithmConfig(**case["algorithm"])
        backend = make(MegatronBackend, str(Path(case["model"])), algorithm, trainer, torch.device("cpu"))
        out.append(steps(backend, algorithm))
        groups.end()
    return out

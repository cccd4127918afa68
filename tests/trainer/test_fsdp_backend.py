"""All that a run asks of a backend, asked of "torch" over ranks: canary, reference, checkpoints, empty batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_options
import fsdp_ranks
import pytest
from backend_ranks import life, make, same
from rank_pool import run_ranks
from sharded_models import make_model

from async_rl.config import AlgorithmConfig
from trainer.torch_backend import TorchBackend

pytestmark = [pytest.mark.scale, pytest.mark.timeout(400)]

CASES: list[dict[str, Any]] = [
    {"micro_batch_tokens": 24, "activation_checkpointing": True},  # several micro-batches on each rank
    {"updates_per_batch": 2, "packing": "never"},
]


def test_a_backends_life_is_that_of_one_process(tmp_path: Path) -> None:
    model = make_model("dense", tmp_path / "model")
    payload = []
    for number, trainer in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        payload.append({"model": str(model), "folder": str(folder), "trainer": trainer})
    one, other = run_ranks(2, f"{fsdp_ranks.__name__}:{fsdp_ranks.live.__name__}", payload, timeout=280)
    same(one, other, 0.0)
    for trainer, found in zip(CASES, one, strict=True):
        expected = life(make(TorchBackend, model, trainer, "cpu"), tmp_path)
        assert found.pop("again") == (True, True), trainer
        expected.pop("again")
        for step in ("step 0", "step 1"):
            assert 1 <= found[step].pop("rank_imbalance") < 1.1, (trainer, step)
        assert found["alone"].pop("rank_imbalance") == 2, trainer  # one attempt: a rank computes nothing that counts
        same(found, expected, 2e-5)


def test_centred_scores_are_those_of_one_process(tmp_path: Path) -> None:
    model = make_model("dense", tmp_path / "model")
    one, other = run_ranks(2, f"{fsdp_ranks.__name__}:{fsdp_ranks.centred.__name__}", str(model), timeout=280)
    same(one, other, 0.0)
    algorithm = AlgorithmConfig(**backend_options.CENTRED)
    expected = backend_options.steps(backend_options.make(TorchBackend, str(model), algorithm, {}, "cpu"), algorithm)
    for step in one:
        step["metrics"].pop("rank_imbalance")
    same(one, expected, 2e-5)

"""The canary: noise in every target, made from the seed alone, that leaves the trainer as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_lm import save_qwen3

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.policy.adapter import read_adapter
from async_rl.proof import CANARY, CANARY_FLOOR, mismatch
from trainer.backend import Sample
from trainer.canary import distance
from trainer.proving import Prover
from trainer.torch_backend import TorchBackend

VOCAB = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(
        tmp_path_factory.mktemp("model"), std=0.25,
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip


def make_backend(model: Path, seed: int = 1) -> TorchBackend:
    trainer = TrainerConfig(rank=4, learning_rate=2e-2)
    return TorchBackend(model, trainer=trainer, algorithm=AlgorithmConfig(), temperature=1.0, seed=seed)


def train(backend: TorchBackend, advantage: float = 1.0) -> bool:
    tokens = np.arange(10, dtype=np.int32)
    mask = (tokens < 4).astype(np.uint8)
    sample = Sample(tokens, np.full(10, -3.0, np.float32), mask, np.zeros(10, np.int32), advantage, 0, 0)
    return backend.step([sample], 2e-2).skipped


def test_the_canary_is_noise_in_every_tensor_and_moves_the_model_by_the_floor(model: Path, tmp_path: Path) -> None:
    policy, proof = Prover(make_backend(model), seed=3).canary(tmp_path / "canary")
    tensors, config = read_adapter(tmp_path / "canary", policy.digest)
    assert policy.name == CANARY
    assert {name.split(".")[-3] for name in tensors} == set(config["target_modules"])
    assert all(bool((tensor != 0).all()) for tensor in tensors.values())
    measured = mismatch(proof.base, proof.logprobs)
    assert measured is not None
    assert measured.max_dlogp >= CANARY_FLOOR
    assert proof.module_count == len(tensors) / 2 == 14


def test_the_canary_leaves_weights_and_optimiser_bit_for_bit_as_they_were(model: Path, tmp_path: Path) -> None:
    backend, twin = make_backend(model), make_backend(model)
    for each in (backend, twin):
        train(each)
    Prover(backend, seed=3).canary(tmp_path / "canary")
    assert backend.export(tmp_path / "a") == twin.export(tmp_path / "b")
    for each in (backend, twin):
        train(each)
    assert backend.export(tmp_path / "a") == twin.export(tmp_path / "b")


def test_the_canary_follows_from_the_seed_and_not_from_what_was_trained(model: Path, tmp_path: Path) -> None:
    """So a trainer that resumes makes the one that the nodes know."""
    fresh, trained = make_backend(model), make_backend(model, seed=2)
    train(trained)
    made = [Prover(each, seed=3).canary(tmp_path / "canary") for each in (fresh, trained)]
    assert made[0] == made[1]
    assert Prover(fresh, seed=4).canary(tmp_path / "canary")[0] != made[0][0]


def test_a_policys_proof_is_of_its_weights_and_is_not_made_again_for_a_skipped_step(
    model: Path, tmp_path: Path
) -> None:
    backend = make_backend(model)
    prover = Prover(backend, seed=3)
    first = prover.prove(backend.export(tmp_path / "a"))
    assert train(backend, advantage=0.0)
    assert prover.prove(backend.export(tmp_path / "a")) is first
    assert not train(backend)
    second = prover.prove(backend.export(tmp_path / "a"))
    assert second.logprobs != first.logprobs
    assert second.modules == first.modules


def test_distance_is_the_largest_difference() -> None:
    ours = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    theirs = [np.array([-1.5, -2.0], np.float32), np.array([-1.0], np.float32)]
    assert distance(ours, theirs) == 2.0

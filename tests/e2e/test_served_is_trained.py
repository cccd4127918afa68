"""The policy that a node serves is the policy that the trainer trained: for every push, real backend against real
engine, through the adapter file that the store carries."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tiny_lm import save_qwen3

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.version import PolicyId, token_versions
from async_rl.wire.messages import SamplingParams
from inference.engine import Completion, Request
from inference.torch_engine import TorchEngine
from trainer.backend import Sample
from trainer.torch_backend import TorchBackend

VOCAB, CONTEXT, REQUESTS, NEW = 40, 48, 12, 24
TOLERANCE = 1e-5  # natural-log units, fp32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


class Pair:
    """A trainer and an engine on the same base model, and the pushes between them."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        temperature: float = 1.0,
        ratio_level: Literal["token", "sequence"] = "sequence",
    ) -> None:
        # A learning rate at which one step moves log-probabilities by far more than the tolerance.
        trainer = TrainerConfig(rank=4, learning_rate=2e-2, warmup_steps=0)
        algorithm = AlgorithmConfig(ratio_level=ratio_level)
        self.backend = TorchBackend(model, trainer=trainer, algorithm=algorithm, temperature=temperature, seed=1)
        self.temperature = temperature
        self.engine = TorchEngine(model, slots=REQUESTS, max_context=CONTEXT, max_resident=3)
        self.folder = folder
        self.version = -1
        self.random = np.random.default_rng(0)
        self.sequences = [self.random.integers(0, VOCAB, CONTEXT).astype(np.int32) for _ in range(6)]

    def push(self, in_flight: str = "finish") -> PolicyId:
        self.version += 1
        path = self.folder / f"{self.version}.safetensors"
        policy = PolicyId("main", self.version, self.backend.export(path))
        self.engine.install(policy, path)
        self.engine.flip(policy, in_flight)
        return policy

    def train(self) -> None:
        samples = [
            Sample(
                tokens, np.full(CONTEXT, -3.5, np.float32), np.zeros(CONTEXT, np.uint8) | (np.arange(CONTEXT) < 8),
                np.zeros(CONTEXT, np.int32), float(self.random.normal()), index, index // 2,
            )
            for index, tokens in enumerate(self.sequences)
        ]  # fmt: skip
        assert not self.backend.step(samples, 2e-2).skipped

    def submit(self, first: int = 0) -> dict[tuple[int, int], np.ndarray]:
        prompts = {}
        for index in range(first, first + REQUESTS):
            prompt = self.random.integers(0, VOCAB, 4 + index % 3).astype(np.int32)
            prompts[(0, index)] = prompt
            self.engine.submit(Request((0, index), prompt, SamplingParams(self.temperature, NEW), seed=index))
        return prompts

    def finish(self) -> list[Completion]:
        done: list[Completion] = []
        while self.engine.active:
            done += self.engine.step()
        return done


def completed(prompt: np.ndarray, completion: Completion, index: int) -> Sample:
    """What the trainer gets of it."""
    tokens = np.concatenate([prompt, completion.tokens]).astype(np.int32)
    mask = (np.arange(len(tokens)) < len(prompt)).astype(np.uint8)
    behaviour = np.zeros(len(tokens), np.float32)
    behaviour[len(prompt) :] = completion.logprobs
    return Sample(tokens, behaviour, mask, np.zeros(len(tokens), np.int32), (-1.0) ** index, index, index // 2)


def test_for_every_push_the_engine_scores_as_the_trainer_does(model, tmp_path):
    pair = Pair(model, tmp_path)
    before = None
    for _ in range(5):
        policy = pair.push()
        served = np.concatenate(pair.engine.score(policy, pair.sequences))
        trained = np.concatenate(pair.backend.logprobs(pair.sequences))
        assert np.abs(served - trained).max() <= TOLERANCE
        if before is not None:
            # The push changed something, so that the line above could fail.
            assert np.abs(served - before).max() > 100 * TOLERANCE
        before = served
        for old in list(pair.engine.resident):
            if old != policy:
                pair.engine.evict(old)
        pair.train()


@pytest.mark.parametrize("in_flight", ["finish", "recompute", "continue"])
def test_recorded_log_probabilities_are_the_trainers_of_the_stamped_version(model, tmp_path, in_flight):
    pair = Pair(model, tmp_path)
    old = pair.push()
    prompts = pair.submit()
    for _ in range(NEW // 2):
        assert pair.engine.step() == []
    pair.train()
    new = pair.push(in_flight)
    # A second trainer that never stepped still says what the old version would.
    oracle_of = {old.version: Pair(model, tmp_path).backend.logprobs, new.version: pair.backend.logprobs}

    done = pair.finish()
    assert len(done) == REQUESTS
    for completion in done:
        prompt = prompts[completion.key]
        whole = np.concatenate([prompt, completion.tokens])
        versions = token_versions(completion.versions)
        flips = np.flatnonzero(np.diff(versions))
        expected_versions = {old.version} if in_flight == "finish" else {old.version, new.version}
        assert set(versions.tolist()) == expected_versions
        for version in expected_versions:
            if in_flight == "continue" and version == new.version:
                continue  # from the flip on the KV cache is of the old policy: a mixture that no trainer can score
            oracle = oracle_of[version]([whole])[0][len(prompt) - 1 :]
            places = versions == version
            assert np.abs(oracle[places] - completion.logprobs[places]).max() <= TOLERANCE
        assert len(flips) == len(expected_versions) - 1


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_at_another_temperature_the_ratio_of_identical_policies_is_one(model, tmp_path, ratio_level):
    """Sampled by the engine at 0.7, judged by a step of the trainer under the same adapter."""
    pair = Pair(model, tmp_path, temperature=0.7, ratio_level=ratio_level)
    pair.push()
    pair.train()
    policy = pair.push()
    prompts, done = {}, []
    for seed in range(8):
        prompts |= pair.submit(first=seed * REQUESTS)
        done += pair.finish()
    samples = [completed(prompts[completion.key], completion, index) for index, completion in enumerate(done)]
    assert {version for sample in done for version in token_versions(sample.versions)} == {policy.version}
    metrics = pair.backend.step(samples, 0.0).metrics
    assert metrics["tokens"] > 2000
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["mismatch_max"] < TOLERANCE
    # The same tokens judged at temperature 1. A ratio's mean under its denominator is near 1 whatever the numerator
    # is, so what tells is each token's own.
    pair.backend.temperature = 1.0
    assert pair.backend.step(samples, 0.0).metrics["mismatch_mean"] > 1000 * TOLERANCE

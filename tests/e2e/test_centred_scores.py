"""Centred scores from engine to gradient: what the engine sends is what the trainer has, and a run trains on it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import real_runs
import torch
from tiny_lm import save_qwen3

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.top_tokens import TopTokens
from async_rl.version import PolicyId
from async_rl.wire.messages import SamplingParams
from inference.engine import Completion, Request
from inference.torch_engine import TorchEngine
from trainer.backend import Sample
from trainer.head import Mixture
from trainer.torch_backend import TorchBackend

VOCAB, CONTEXT, REQUESTS, NEW, K, TEMPERATURE = 40, 48, 12, 20, 8, 0.7
TOLERANCE = 1e-5  # natural-log units, fp32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip


def make_backend(model: Path, k: int, packing: str = "auto") -> TorchBackend:
    trainer = TrainerConfig(rank=4, learning_rate=2e-2, warmup_steps=0, packing=packing, micro_batch_tokens=200)
    algorithm = AlgorithmConfig(treatment="uncorrected", center_scores=k)
    backend = TorchBackend(model, trainer=trainer, algorithm=algorithm, temperature=TEMPERATURE, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in backend.learnable.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return backend


def sample_from(backend: TorchBackend, model: Path, folder: Path, k: int) -> list[Sample]:
    """What the engine gives under the backend's policy, as the trainer gets it."""
    engine = TorchEngine(model, slots=REQUESTS, max_context=CONTEXT, max_resident=2, top_tokens=k)
    path = folder / "policy.safetensors"
    policy = PolicyId("main", 0, backend.export(path))
    engine.install(policy, path)
    engine.flip(policy, "finish")
    random = np.random.default_rng(0)
    prompts = {(0, i): random.integers(0, VOCAB, 3 + i % 4).astype(np.int32) for i in range(REQUESTS)}
    for key, prompt in prompts.items():
        engine.submit(Request(key, prompt, SamplingParams(TEMPERATURE, NEW - key[1] % 5), seed=key[1]))
    done: list[Completion] = []
    while engine.active:
        done += engine.step()
    return [sample_of(prompts[each.key], each, random.normal()) for each in done]


def sample_of(prompt: np.ndarray, of: Completion, advantage: float) -> Sample:
    n, index = len(prompt) + len(of.tokens), of.key[1]
    before = ((len(prompt), 0), (0, 0))
    assert of.top is not None
    return Sample(
        np.concatenate([prompt, of.tokens]), np.concatenate([np.zeros(len(prompt), np.float32), of.logprobs]),
        (np.arange(n) < len(prompt)).astype(np.uint8), np.zeros(n, np.int32), advantage, index, index // 2,
        TopTokens(np.pad(of.top.ids, before), np.pad(of.top.logprobs, before)),
    )  # fmt: skip


def test_the_engines_likeliest_tokens_have_the_trainers_log_probabilities(model: Path, tmp_path: Path) -> None:
    """Each by itself, as a mixture of one token."""
    backend = make_backend(model, K)
    samples = sample_from(backend, model, tmp_path, K)
    batch = backend._flatten(samples)
    assert batch.top is not None
    largest = 0.0
    with torch.no_grad():
        for rows, where, _ in backend._micro_batches(samples, batch):
            ids, probability = batch.top.at(where)
            for j in range(K):
                alone = Mixture(ids[:, j : j + 1], torch.ones(len(where), 1))
                _, logprobs = backend.scorer.logprobs_and_mean(rows, alone, TEMPERATURE)
                largest = max(largest, float((logprobs - probability[:, j].log()).abs().max()))
    assert 0 < largest <= TOLERANCE


def plain_gradient(backend: TorchBackend, samples: list[Sample]) -> torch.Tensor:
    """Of -mean A (log π(a) - Σ_j μ_j log π(j)) over all tokens, each answer alone through the model."""
    losses = []
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        logprobs = torch.log_softmax(backend.model(input_ids=ids, use_cache=False).logits[0] / TEMPERATURE, -1)
        for place in np.flatnonzero(sample.mask == 0).tolist():
            here = logprobs[place - 1]
            assert sample.top is not None
            pairs = zip(sample.top.ids[place].tolist(), sample.top.logprobs[place].tolist(), strict=True)
            expected = sum((math.exp(log_mu) * here[token] for token, log_mu in pairs), torch.zeros(()))
            losses.append(-sample.advantage * (here[int(sample.tokens[place])] - expected))
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(backend.learnable.parameters.values()))
    return torch.cat([each.flatten() for each in gradients])


def accumulated(backend: TorchBackend, samples: list[Sample]) -> torch.Tensor:
    backend.learnable.optimizer.zero_grad()
    backend._accumulate(samples, backend._flatten(samples))
    return torch.cat([parameter.grad.flatten() for parameter in backend.learnable.parameters.values()])


@pytest.mark.parametrize("packing", ["auto", "never"])
@pytest.mark.parametrize("k", [K, VOCAB])
def test_the_gradient_of_a_batch_is_that_of_the_plain_formula(
    model: Path, tmp_path: Path, k: int, packing: str
) -> None:
    backend = make_backend(model, k, "never")
    samples = sample_from(backend, model, tmp_path, k)
    expected = plain_gradient(backend, samples)
    found = accumulated(make_backend(model, k, packing), samples)
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_a_constant_advantage_teaches_less_the_more_of_the_probability_is_counted(model: Path, tmp_path: Path) -> None:
    """At equal policies Σ_j μ_j ∇ log π(j) over all tokens is zero at every place, and what it takes away nothing."""
    norms = {}
    for k in (K, VOCAB):
        backend = make_backend(model, k)
        samples = [each._replace(advantage=1.0) for each in sample_from(backend, model, tmp_path, k)]
        backend.algorithm = AlgorithmConfig(treatment="uncorrected")
        plain = accumulated(backend, samples)
        backend.algorithm = AlgorithmConfig(treatment="uncorrected", center_scores=k)
        norms[k] = float((accumulated(backend, samples) - plain).norm() / plain.norm())
        mass = backend.step(samples, 0.0).metrics["top_mass"]
        assert mass == pytest.approx(1.0, abs=1e-5) if k == VOCAB else 0.3 < mass < 0.999
    assert norms[VOCAB] < 1e-4 < 1e-2 < norms[K]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_run_with_centred_scores_ends_well_with_finite_numbers(shell: Callable[..., object]) -> None:
    run = shell.folder / "centred"
    config = tomllib.loads(shell.config.read_text())
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "run.steps=3", "--set", "run.eval_every=3",
        "--set", "algorithm.preset=score_centering", "--set", "inference.handover=discard",
        "--set", "algorithm.alarms.action=warn", timeout=500,
    )  # fmt: skip
    assert code == 0, output
    records = real_runs.records(run)
    assert [record["trained"] for record in records] == [
        config["buffer"]["groups_per_step"] * config["buffer"]["group_size"]
    ] * 3
    for record in records:
        numbers = [value for value in record.values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in numbers)
        assert 0.9 < record["top_mass"] < 1 + 1e-5
        assert record["grad_norm"] > 0
        assert record["dropped"] == 0
    ledger = real_runs.summary(run)["ledger"]
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())

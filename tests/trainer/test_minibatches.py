"""Several optimiser steps on one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from async_rl.algorithm_config import AlgorithmConfig
from async_rl.config import TrainerConfig
from trainer.backend import Sample
from trainer.minibatches import split_groups
from trainer.torch_backend import TorchBackend

VOCABULARY = 17
RATE = 0.05
DECOUPLED = AlgorithmConfig(surrogate="decoupled_ppo", ratio_level="token", ratio_high=1.5, clip_low=0.9, clip_high=1.1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=VOCABULARY,
        initializer_range=0.3,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(path)
    return path


def make(path: Path, algorithm: AlgorithmConfig | None = None, **trainer: Any) -> TorchBackend:
    return TorchBackend(
        path,
        trainer=TrainerConfig(rank=4, alpha=8.0, **trainer),
        algorithm=algorithm or AlgorithmConfig(ratio_level="token"),
        temperature=1.0,
        seed=3,
        dtype="float64",
        device="cpu",
    )


def batch(groups: int = 4, size: int = 3, seed: int = 0) -> list[Sample]:
    generator = np.random.default_rng(seed)
    out = []
    for index in range(groups * size):
        length = int(generator.integers(5, 12))
        mask = (np.arange(length) < 2).astype(np.uint8)
        behaviour = np.where(mask == 0, -generator.exponential(2.0, length), 0).astype(np.float32)
        tokens = generator.integers(0, VOCABULARY, length).astype(np.int32)
        advantage = float(generator.normal())
        out.append(Sample(tokens, behaviour, mask, np.zeros(length, np.int32), advantage, index, index // size))
    return out


def weights(backend: TorchBackend) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in backend.learnable.parameters.values()]


def state(backend: TorchBackend) -> list[torch.Tensor]:
    moments = [each[key].clone() for each in backend.learnable.optimizer.state.values() for key in sorted(each)]
    return [*weights(backend), *moments, torch.tensor(backend.learnable.steps)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 8))
def test_parts_are_whole_groups_of_even_number_and_all_of_them(groups: list[int], parts: int) -> None:
    mask = np.zeros(1, np.uint8)
    samples = [Sample(mask, mask, mask, mask, 0.0, index, group) for index, group in enumerate(groups)]
    split = split_groups(samples, parts)
    assert sorted(place for part in split for place in part) == list(range(len(groups)))
    assert all(part == sorted(part) for part in split)
    of_parts = [{groups[place] for place in part} for part in split]
    assert sum(len(each) for each in of_parts) == len(set(groups))
    assert len(split) == max(min(parts, len(set(groups))), 1)
    assert max(len(each) for each in of_parts) - min(len(each) for each in of_parts) <= 1


def test_two_updates_are_two_steps_on_the_halves(model_path: Path) -> None:
    samples = batch()
    at_once, one_by_one = make(model_path, updates_per_batch=2), make(model_path)
    result = at_once.step(samples, RATE)
    halves = [one_by_one.step(half, RATE) for half in (samples[:6], samples[6:])]
    assert same(state(at_once), state(one_by_one))
    assert at_once.learnable.steps == 2
    for name in ("loss", "grad_norm"):
        assert result.metrics[name] == pytest.approx(sum(half.metrics[name] for half in halves) / 2, rel=1e-12)


def test_proximal_log_probabilities_are_those_before_the_first_step(model_path: Path) -> None:
    samples = batch()
    samples[4] = samples[4]._replace(mask=np.ones_like(samples[4].mask))  # nothing of it trains
    before = make(model_path).step(samples, 0.0)
    result = make(model_path, updates_per_batch=3).step(samples, RATE)
    for ours, theirs in zip(result.proximal, before.proximal, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not result.proximal[4].any()
    assert result.metrics["k3"] == pytest.approx(before.metrics["k3"], rel=1e-9)


def test_the_second_step_clips_against_the_policy_before_the_first(model_path: Path) -> None:
    """Its gradient by hand: w · min(r A, clip(r) A) on whole logits, r against what the first step started from."""
    samples = batch()
    backend = make(model_path, DECOUPLED, updates_per_batch=2)
    before = weights(backend)
    proximal = [torch.from_numpy(each) for each in make(model_path).step(samples, 0.0).proximal]
    backend.step(samples, RATE)

    by_hand = make(model_path, DECOUPLED)
    by_hand.step(samples[:6], RATE)
    assert not same(weights(by_hand), before)
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for sample, old in zip(samples[6:], proximal[6:], strict=True):
        trains = torch.from_numpy(sample.mask[1:] == 0)
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        logp = torch.log_softmax(by_hand.model(input_ids=ids[None]).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0]
        ratio = (logp - old[1:].double()).exp()[trains]
        weight = (old - torch.from_numpy(sample.behaviour)).double().exp().clamp(max=1.5)[1:][trains]
        inside = ratio.clamp(0.9, 1.1)
        total = total - (weight * torch.minimum(ratio * sample.advantage, inside * sample.advantage)).sum()
        clipped += int((ratio != inside).sum())
    total = total / sum(int((sample.mask == 0).sum()) for sample in samples[6:])
    by_hand.learnable.optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(by_hand.learnable.parameters.values(), 1.0)
    by_hand.learnable.optimizer.step()
    assert clipped > 5  # the first step went far enough for the second to have something to clip
    for ours, theirs in zip(weights(backend), weights(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # proximal values travel as float32


def test_when_a_later_step_fails_the_earlier_ones_are_taken_back(model_path: Path) -> None:
    backend = make(model_path, updates_per_batch=4)
    backend.step(batch(seed=1), RATE)
    before = state(backend)
    broken = batch()
    broken[-1] = broken[-1]._replace(advantage=float("nan"))
    with pytest.raises(FloatingPointError, match="after 7 optimiser steps: loss nan"):
        backend.step(broken, RATE)
    assert same(state(backend), before)
    assert not backend.step(batch(), RATE).skipped


def test_what_cannot_be_learned_from_is_skipped(model_path: Path) -> None:
    backend = make(model_path, updates_per_batch=2)
    flat = [sample._replace(advantage=0.0) for sample in batch()]
    before = state(backend)
    assert backend.step(flat, RATE).skipped
    assert backend.step([], RATE).skipped
    assert same(state(backend), before)
    half = [sample._replace(advantage=0.0) if sample.group < 2 else sample for sample in batch()]
    assert not backend.step(half, RATE).skipped
    assert backend.learnable.steps == 1

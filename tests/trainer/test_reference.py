"""The reference policy of the torch backend: the same model with its adapter off."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from gradient_batches import gradient, make_backend, make_batch, make_model
from transformers import AutoModelForCausalLM

from async_rl.config import AlgorithmConfig
from trainer.backend import Sample
from trainer.logprobs import Rows
from trainer.minibatches import split_groups

TEMPERATURE = 0.7  # of make_backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def plain_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Of the sample's trained tokens, through whole logits, one sequence at a time."""
    ids = torch.from_numpy(sample.tokens.astype(np.int64))
    logp = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, -1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0][torch.from_numpy(sample.mask[1:] == 0)]


def test_reference_logprobs_are_the_base_models_and_leave_the_adapter_as_it_was(folder: Path) -> None:
    batch, base = make_batch(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    backend = make_backend(folder, AlgorithmConfig(), "float64", budget=30)
    before = {name: parameter.detach().clone() for name, parameter in backend.learnable.parameters.items()}
    for sample, reference in zip(batch, backend.reference(batch), strict=True):
        expected = plain_logprobs(base, sample).detach().numpy()
        np.testing.assert_allclose(reference[sample.mask == 0], expected, rtol=1e-6)
        assert not reference[sample.mask != 0].any()
    assert all(torch.equal(before[name], parameter) for name, parameter in backend.learnable.parameters.items())
    assert all(parameter.requires_grad for parameter in backend.learnable.parameters.values())
    policy = backend.step(batch, 0.0).proximal
    assert max(np.abs(p - r).max() for p, r in zip(policy, backend.reference(batch), strict=True)) > 0.05


@pytest.mark.parametrize(("form", "weighted"), [("k2", False), ("k3", False), ("k1", True), ("k2", True), ("k3", True)])
def test_the_gradient_of_the_penalty_is_that_of_the_written_out_loss(folder: Path, form: str, weighted: bool) -> None:
    """0.5/N Σ [r·] k(log π_ref - log π), all advantages 0, by whole logits of two plain models."""
    algorithm = AlgorithmConfig(reference_kl=form, reference_kl_ratio=weighted, reference_kl_weight=0.5)
    batch = [sample._replace(advantage=0.0) for sample in make_batch(folder)]
    backend = make_backend(folder, algorithm, "float64", budget=30)
    ours = gradient(backend, batch)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    backend.learnable.optimizer.zero_grad()
    total, n = torch.zeros((), dtype=torch.float64), sum(int((sample.mask == 0).sum()) for sample in batch)
    for sample in batch:
        current = plain_logprobs(backend.model, sample)
        gap = plain_logprobs(base, sample).detach() - current
        value = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - 1 - gap}[form]
        ratio = (current - torch.from_numpy(sample.behaviour[sample.mask == 0].astype(np.float64))).exp()
        ratio = ratio.detach() if form == "k2" else ratio
        total = total + ((ratio if weighted else 1.0) * value).sum()
    (0.5 * total / n).backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in backend.learnable.parameters.values()]).numpy()
    assert np.linalg.norm(ours) > 0
    assert np.linalg.norm(ours - theirs) < 1e-9 * np.linalg.norm(theirs)


def test_several_updates_of_a_batch_ask_for_its_reference_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(folder)
    algorithm = AlgorithmConfig(reference_kl="k3", reference_kl_weight=0.5)
    at_once, one_by_one = (make_backend(folder, algorithm, "float64", budget=30) for _ in range(2))
    at_once.trainer = msgspec.structs.replace(at_once.trainer, updates_per_batch=2)
    asked: list[int] = []
    ask = at_once._reference_logprobs
    monkeypatch.setattr(at_once, "_reference_logprobs", lambda rows: [asked.append(len(rows.target)), ask(rows)][1])
    at_once.step(batch, 1e-3)
    assert sum(asked) == sum(int((sample.mask == 0).sum()) for sample in batch)
    for places in split_groups(batch, 2):
        one_by_one.step([batch[place] for place in places], 1e-3)
    pairs = zip(at_once.learnable.parameters.values(), one_by_one.learnable.parameters.values(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_steps_without_any_advantage_go_back_to_the_reference(folder: Path) -> None:
    batch = [sample._replace(advantage=0.0) for sample in make_batch(folder)]
    backend = make_backend(folder, AlgorithmConfig(reference_kl="k3", reference_kl_weight=1.0), "float32")
    first = backend.step(batch, 5e-3)
    assert not first.skipped
    for _ in range(15):
        last = backend.step(batch, 5e-3)
    assert 0 <= last.metrics["reference_kl"] < first.metrics["reference_kl"] / 2


def test_a_token_that_the_trainer_holds_to_be_impossible_and_a_veto_stops_costs_no_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = AlgorithmConfig(veto=1e-4, ratio_level="token", reference_kl="k3", reference_kl_ratio=True)
    backend = make_backend(folder, algorithm, "float32")
    plain = backend.scorer.logprobs

    def with_an_impossible_token(rows: Rows, temperature: float) -> torch.Tensor:
        logprobs = plain(rows, temperature)
        return torch.where(torch.arange(len(logprobs)) == 3, -torch.inf, logprobs)

    monkeypatch.setattr(backend.scorer, "logprobs", with_an_impossible_token)
    result = backend.step(make_batch(folder), 1e-3)
    assert not result.skipped
    assert result.metrics["vetoed"] > 0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert all(parameter.isfinite().all() for parameter in backend.learnable.parameters.values())


def test_a_weight_of_zero_only_measures(folder: Path) -> None:
    batch = make_batch(folder)
    watched = make_backend(folder, AlgorithmConfig(reference_kl="k2", reference_kl_weight=0.0), "float32")
    plain = make_backend(folder, AlgorithmConfig(), "float32")
    np.testing.assert_array_equal(gradient(watched, batch), gradient(plain, batch))
    assert watched.step(batch, 1e-3).metrics["reference_kl"] > 0
    assert "reference_kl" not in plain.step(batch, 1e-3).metrics


def test_the_learning_fraction_counts_the_tokens_that_move_the_policy_whatever_else_is_in_the_loss(
    folder: Path,
) -> None:
    clip = {"ratio_level": "token", "treatment": "clip", "ratio_low": 0.98, "ratio_high": 1.02, "surrogate": "ppo"}
    batch = make_batch(folder)
    batch[2] = batch[2]._replace(advantage=0.0)
    for extra in ({}, {"reference_kl": "k2"}):
        result = make_backend(folder, AlgorithmConfig(**clip, **extra), "float32", budget=30).step(batch, 0.0)
        moves = []
        for sample, proximal in zip(batch, result.proximal, strict=True):
            ratio = np.exp(proximal - sample.behaviour)[sample.mask == 0]
            stopped = ratio > 1.02 if sample.advantage > 0 else ratio < 0.98
            moves += list(~stopped) if sample.advantage else []
        assert 0.2 < np.mean(moves) < 0.9
        assert result.metrics["learning_fraction"] == pytest.approx(np.mean(moves))
    nothing = [sample._replace(advantage=0.0) for sample in batch]
    assert make_backend(folder, AlgorithmConfig(), "float32").step(nothing, 0.0).metrics["learning_fraction"] == 1.0

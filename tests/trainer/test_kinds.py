"""What every trainer kind must do: learn, be a transaction, go on exactly, and come out as a file that loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_lm import VOCABULARY, tiny_lm
from transformers import AutoModelForCausalLM

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.update_file import read_base, read_kind, read_snapshot, weights_digest
from async_rl.top_tokens import TopTokens
from trainer.backend import Sample
from trainer.checkpoint import write_checkpoint
from trainer.export import export
from trainer.torch_backend import TorchBackend

RATES = {"lora": 5e-3, "full": 1e-3, "sketch": 2e-3}
KINDS = list(RATES)
WHOLE = [kind for kind in KINDS if kind != "lora"]
IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_lm("qwen3").save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    tiny_lm("qwen3", tie_word_embeddings=True).save_pretrained(path)
    return path


def make(path: Path, kind: str, dtype: str = "float32", algorithm: AlgorithmConfig | None = None, **more: Any) -> Any:
    return TorchBackend(
        path,
        trainer=TrainerConfig(kind=kind, **({} if kind == "full" else {"rank": 4}), **more),
        algorithm=algorithm or AlgorithmConfig(treatment="uncorrected"),
        temperature=1.0,
        seed=11,
        dtype=dtype,
        device="cpu",
    )


def samples(seed: int = 0, n: int = 8, advantage: float | None = None) -> list[Sample]:
    generator = np.random.default_rng(seed)
    batch = []
    for index in range(n):
        length = int(generator.integers(6, 16))
        mask = np.ones(length, np.uint8)
        mask[3:] = 0
        batch.append(
            Sample(
                tokens=generator.integers(0, VOCABULARY, length).astype(np.int32),
                behaviour=np.where(mask == 0, -3.0, 0).astype(np.float32),
                mask=mask,
                ages=np.zeros(length, np.int32),
                advantage=float(generator.normal()) if advantage is None else advantage,
                attempt=index,
                group=index // 2,
            )
        )
    return batch


def state(backend: TorchBackend, folder: Path) -> dict[str, bytes]:
    """All that a checkpoint keeps, to the byte: weights, optimiser, counters."""
    folder.mkdir()
    backend.save(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_what_was_rewarded_likelier(model_path: Path, kind: str) -> None:
    backend = make(model_path, kind)
    batch = samples(advantage=1.0)
    steps = [backend.step(batch, RATES[kind]) for _ in range(10)]
    assert not any(result.skipped for result in steps)
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"] - 0.2
    key = "update_ratio" if kind == "sketch" else "learning_rate"
    assert steps[0].metrics[key] == RATES[kind]
    assert backend.learnable.steps == 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{"activation_checkpointing": True}, {"packing": "never", "micro_batch_tokens": 40}])
def test_how_a_batch_is_computed_does_not_matter_to_any_kind(model_path: Path, kind: str, more: dict[str, Any]) -> None:
    plain, other = make(model_path, kind), make(model_path, kind, **more)
    for seed in range(2):
        ours, theirs = plain.step(samples(seed), 1e-4), other.step(samples(seed), 1e-4)
        assert theirs.metrics["grad_norm"] == pytest.approx(ours.metrics["grad_norm"], rel=1e-3)
        assert theirs.metrics["loss"] == pytest.approx(ours.metrics["loss"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_several_updates_of_a_batch_are_taken_or_none(model_path: Path, tmp_path: Path, kind: str) -> None:
    backend = make(model_path, kind, updates_per_batch=2)
    backend.step(samples(), 1e-3)
    assert backend.learnable.steps == 2
    before = state(backend, tmp_path / "before")
    broken = samples(1)
    broken[-1] = broken[-1]._replace(advantage=float("nan"))
    with pytest.raises(FloatingPointError, match="after 3 optimiser steps: loss nan"):
        backend.step(broken, 1e-3)
    assert state(backend, tmp_path / "after") == before
    assert not backend.step(samples(1), 1e-3).skipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_or_is_skipped_changes_nothing(model_path: Path, tmp_path: Path, kind: str) -> None:
    backend, twin = make(model_path, kind), make(model_path, kind)
    for each in (backend, twin):
        each.step(samples(), 1e-3)
    before = state(backend, tmp_path / "before")
    broken = samples(1)
    broken[-1] = broken[-1]._replace(advantage=float("inf"))
    with pytest.raises(FloatingPointError, match="loss"):
        backend.step(broken, 1e-3)
    assert backend.step(samples(advantage=0.0), 1e-3).skipped
    assert backend.step([], 1e-3).skipped
    assert state(backend, tmp_path / "after") == before
    assert backend.step(samples(2), 1e-3).metrics == twin.step(samples(2), 1e-3).metrics


@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_that_is_taken_whole_is_the_step(model_path: Path, kind: str) -> None:
    """And until it is taken, or when it is taken back, the weights are what they were."""
    moved, asked = make(model_path, kind), make(model_path, kind)
    for each in (moved, asked):
        each.step(samples(), 1e-3)
        each._accumulate(samples(1), each._flatten(samples(1)))
    tokens = [sample.tokens for sample in samples()]
    norm = moved.learnable.norm()
    start = asked.logprobs(tokens)
    restore = asked.learnable.snapshot()
    moved.learnable.move(norm, 1e-3)
    proposal = asked.learnable.propose(norm, 1e-3)
    assert all(np.array_equal(a, b) for a, b in zip(asked.logprobs(tokens), start, strict=True))
    asked.learnable.take(proposal, 1.0)
    ends = asked.logprobs(tokens)
    assert asked.learnable.steps == moved.learnable.steps == 2
    for ours, theirs, first in zip(ends, moved.logprobs(tokens), start, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert not np.array_equal(ours, first)
    restore()
    assert asked.learnable.steps == 1
    assert all(np.array_equal(a, b) for a, b in zip(asked.logprobs(tokens), start, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_centred_with_every_kind(model_path: Path, kind: str) -> None:
    generator = np.random.default_rng(0)
    ids = np.array([[generator.permutation(VOCABULARY)[:4] for _ in range(16)]], np.int32)[0]
    top = TopTokens(ids, np.log(np.full((16, 4), 0.2, np.float32)))
    batch = [
        sample._replace(top=TopTokens(top.ids[: len(sample.tokens)], top.logprobs[: len(sample.tokens)]))
        for sample in samples(advantage=1.0)
    ]
    centred = make(model_path, kind, algorithm=AlgorithmConfig(treatment="uncorrected", center_scores=4))
    plain = make(model_path, kind)
    ours, theirs = centred.step(batch, 1e-3).metrics, plain.step(batch, 1e-3).metrics
    assert ours["top_mass"] == pytest.approx(0.8)
    assert ours["grad_norm"] != theirs["grad_norm"] > 0


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), *((kind, "bfloat16") for kind in KINDS)]
)
def test_every_kind_goes_on_exactly_where_it_was_saved(model_path: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    backend = make(model_path, kind, dtype)
    for seed in range(3):
        backend.step(samples(seed), 1e-3)
    digest = backend.export(tmp_path / "published")
    folder = write_checkpoint(tmp_path, 3, backend.save, {})
    resumed = make(model_path, kind, dtype)
    resumed.load(folder)
    assert resumed.export(tmp_path / "again") == digest
    assert (tmp_path / "again").read_bytes() == (tmp_path / "published").read_bytes()
    for seed in range(3, 5):
        assert backend.step(samples(seed), 1e-3).metrics == resumed.step(samples(seed), 1e-3).metrics
        assert backend.export(tmp_path / "a") == resumed.export(tmp_path / "b")
    assert state(backend, tmp_path / "one") == state(resumed, tmp_path / "other")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(
    model_path: Path, tmp_path: Path, kind: str
) -> None:
    other = make(model_path, "full" if kind == "lora" else "lora")
    other.step(samples(), 1e-3)
    other.save(tmp_path)
    backend = make(model_path, kind)
    before = backend.export(tmp_path / "before")
    with pytest.raises(AsyncRLError, match=rf'kind = "{other.trainer.kind}", the configuration asks for "{kind}"'):
        backend.load(tmp_path)
    assert backend.export(tmp_path / "after") == before


@pytest.mark.parametrize("kind", WHOLE)
def test_kinds_that_move_the_models_own_weights_have_no_reference_and_no_canary(
    model_path: Path, tmp_path: Path, kind: str
) -> None:
    backend = make(model_path, kind)
    assert not backend.publishes_canary
    with pytest.raises(AsyncRLError, match=f'kind = "{kind}"'):
        backend.reference(samples())
    with pytest.raises(AsyncRLError, match=f'kind = "{kind}"'):
        backend.canary(tmp_path / "canary", 0, [sample.tokens for sample in samples()])


def test_full_publishes_the_checkpoints_weights_by_name_first_and_then_whole(tied_path: Path, tmp_path: Path) -> None:
    backend = make(tied_path, "full")
    path = tmp_path / "policy"
    first = backend.export(path)
    model = AutoModelForCausalLM.from_pretrained(tied_path)
    assert read_kind(path) == "base"
    assert read_base(path).digest == first == weights_digest(dict(model.named_parameters()))
    backend.step(samples(), 1e-3)
    digest = backend.export(path)
    found = read_snapshot(path, digest)
    assert "lm_head.weight" not in found.tensors  # tied to the embeddings
    assert found.tensors.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensor, backend.model.get_parameter(name)) for name, tensor in found.tensors.items())
    assert any(not torch.equal(tensor, model.get_parameter(name)) for name, tensor in found.tensors.items())
    assert path.stat().st_size - backend.push_sizes.full < 1 << 14
    assert backend.push_sizes.adapter < backend.push_sizes.full


def final(source: Callable[[Path], Any], folder: Path) -> torch.Tensor:
    source(folder)
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS).logits
    return logits


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_whole_weights_loads_in_transformers(model_path: Path, tmp_path: Path, kind: str) -> None:
    """As the backend writes it at the end of a run, and from a checkpoint or a run's folder by `async-rl export`."""
    backend = make(model_path, kind)
    for seed in range(3):
        backend.step(samples(seed), 1e-3)
    backend.export(tmp_path / "policy")
    run = tmp_path / "run"
    checkpoint = write_checkpoint(run / "checkpoints", 3, backend.save, {})
    with torch.no_grad():
        logits = backend.model(input_ids=IDS).logits
    folders = {
        "final": lambda folder: backend.export_final(folder),
        "checkpoint": lambda folder: export(checkpoint, folder),
        "whole": lambda folder: export(run, folder, merged=True),
        "copy": lambda folder: export(tmp_path / "final", folder),
    }
    for name, write in folders.items():
        torch.testing.assert_close(final(write, tmp_path / name), logits, rtol=0, atol=1e-6)
        assert (tmp_path / name / "tokenizer_config.json").is_file()


def test_a_checkpoint_of_another_models_weights_is_not_exported(
    model_path: Path, tied_path: Path, tmp_path: Path
) -> None:
    backend = make(model_path, "full")
    folder = write_checkpoint(tmp_path, 0, backend.save, {})
    with pytest.raises(AsyncRLError, match=r"another model than .*tied"):
        export(folder, tmp_path / "out", model=str(tied_path))

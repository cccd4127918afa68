"""The staleness benchmark's runs, with the real engine, backend and check of a batch, on a model of no skill at all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from async_rl.config import TinyModelConfig, load_config
from async_rl.run.bench_staleness_cells import Cell, Outcome, Sampled, SampleOrder, Scale, overrides_of
from async_rl.trajectory import decode_trajectory
from inference.bench_staleness_sampler import Sampler, make_sampler
from trainer.backend import Backend
from trainer.backends import make_backend
from trainer.bench_staleness_run import Queue, prepared, run
from trainer.tiny_model import char_tokenizer, new_model

TASK = '''
from async_rl.config import Section
from async_rl.tasks.task import Instance, Score

class Digits:
    """The more digits an answer has, the better."""

    class Config(Section, frozen=True, kw_only=True):
        pass

    def __init__(self, config):
        pass

    def size(self, split):
        return None

    def instance(self, split, instance):
        return Instance(f"{instance % 1000}=", None, "")

    def score(self, instance, completion):
        return Score(sum(map(str.isdigit, completion)) / max(1, len(completion)), {})
'''
SCALE = Scale(updates=6, groups=2, group_size=4, eval_every=4, eval_samples=5)


class SamplerHere:
    """The real sampler, asked without a process between; `orders` are its policies and how many leases each got."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.orders: list[tuple[int, int]] = []

    def ask(self, order: SampleOrder, kind: type[Sampled], timeout_s: float) -> Sampled:
        self.orders.append((order.version, len(order.leases)))
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=SampleOrder)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self._sampler.work_off(copy)), type=kind)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = char_tokenizer()
    tiny = TinyModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=24)
    torch.manual_seed(0)
    model = new_model(tiny, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)  # as made, no adapter could move its logits far
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "digits_task.py").write_text(TASK)
    file = folder / "config.toml"
    file.write_text(
        f'[model]\npath = "{folder / "model"}"\n[task]\nkind = "digits_task:Digits"\n'
        "[inference]\nslots = 8\nmax_new_tokens = 5\nmax_context = 16\n[trainer]\nrank = 2\n"
    )
    return file


@pytest.fixture
def sampler(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> SamplerHere:
    monkeypatch.syspath_prepend(str(config_file.parent))
    return SamplerHere(make_sampler(load_config(str(config_file), ["inference.compile=never"])))


def cell(lag: int, reuse: int = 1, seed: int = 0, rate: float = 1e-2) -> Cell:
    settings = {"algorithm.treatment": "truncate", "algorithm.ratio_level": "sequence"}
    return Cell(correction="any", settings=settings, lag=lag, reuse=reuse, learning_rate=rate, seed=seed)


def scale(config_file: Path, updates: int = SCALE.updates) -> Scale:
    return msgspec.structs.replace(SCALE, config=str(config_file), updates=updates)


def ages(config_file: Path, sampler: SamplerHere, of: Cell, folder: Path) -> list[set[int]]:
    """The ages of the tokens that each update would train."""
    size = scale(config_file)
    config = load_config(size.config, overrides_of(size, of))
    backend: Backend = make_backend(config, Path(config.model.path))
    queue = Queue(config, size, of, sampler)  # type: ignore[arg-type]
    found = []
    for version in range(size.updates):
        queue.fill(version, backend.export(folder / "policy.safetensors"), folder / "policy.safetensors")
        batch = prepared(config, queue.draw(version), backend)
        assert len(batch.rewards) == 8
        found.append(set(batch.ages.tolist()))
    return found


def test_every_token_is_as_old_as_the_lag_once_there_are_so_many_versions(config_file, sampler, tmp_path) -> None:
    assert ages(config_file, sampler, cell(lag=3), tmp_path) == [{0}, {1}, {2}, {3}, {3}, {3}]
    assert sampler.orders == [(0, 8), (1, 2), (2, 2)]  # four batches of two groups at first, none that nobody trains


def test_a_reused_batch_ages_by_one_with_every_use(config_file, sampler, tmp_path) -> None:
    assert ages(config_file, sampler, cell(lag=0, reuse=3), tmp_path) == [{0}, {1}, {2}, {0}, {1}, {2}]
    assert ages(config_file, sampler, cell(lag=2, reuse=2), tmp_path) == [{0}, {1}, {2}, {3}, {2}, {3}]


def test_a_run_is_the_same_again_and_another_seed_is_another_run(config_file, sampler, tmp_path) -> None:
    def made(seed: int) -> Outcome:
        outcome = run(scale(config_file), cell(lag=2, seed=seed), sampler, tmp_path)  # type: ignore[arg-type]
        outcome.train_cpu_s = outcome.sample_cpu_s = 0.0
        return outcome

    first = made(0)
    assert made(0) == first
    assert [version for version, _ in first.evals] == [0, 2, 4, 6]
    assert len(first.rewards) == 6
    assert (first.metrics["age_min"], first.metrics["age_max"]) == (2.0, 2.0)
    assert first.attempts == 48
    assert first.error == ""
    assert made(1).rewards != first.rewards


def test_a_run_learns(config_file, sampler, tmp_path) -> None:
    outcome = run(scale(config_file, updates=30), cell(lag=0, rate=2e-2), sampler, tmp_path)  # type: ignore[arg-type]
    assert np.mean(outcome.rewards[-5:]) > np.mean(outcome.rewards[:5]) + 0.2


def test_all_corrections_of_a_seed_are_asked_the_same_and_the_base_policy_answers_the_same(
    config_file, sampler, tmp_path
) -> None:
    size = scale(config_file)
    drawn = []
    for rate in (1e-2, 1e-3):
        of = cell(lag=1, rate=rate)
        config = load_config(size.config, overrides_of(size, of))
        queue = Queue(config, size, of, sampler)  # type: ignore[arg-type]
        backend = make_backend(config, Path(config.model.path))
        queue.fill(0, backend.export(tmp_path / "policy.safetensors"), tmp_path / "policy.safetensors")
        batch = queue.draw(0).message
        drawn.append([decode_trajectory(trajectory).arrays.tobytes() for trajectory in batch.trajectories])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1

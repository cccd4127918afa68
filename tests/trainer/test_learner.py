"""The learner against a real buffer and a real policy store: what happens when it is told to stop, and at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from buffer_house import FINGERPRINT, PATIENCE_S, RUN, TOKEN, House, deliver
from buffer_house import Context as StoreContext
from safetensors.torch import load_file, save_file

from async_rl.config import Config
from async_rl.policy.adapter import write_adapter
from async_rl.run.metrics import MetricsWriter, read_metrics, steps_of
from async_rl.run.process import StopEvent
from async_rl.run.watchdog import Watchdog
from async_rl.version import PolicyId
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import (
    EvalRequest,
    EvalResult,
    Leases,
    NodeHolds,
    NodeReady,
    NodeServing,
    NodeWants,
    SamplingParams,
    Stop,
)
from buffer.policy_files import PolicyFiles
from buffer.store import StoreService
from trainer.backend import Sample, StepResult
from trainer.canary import Canary
from trainer.checkpoint import find_latest, write_checkpoint
from trainer.learner import Learner, State, run_learner
from trainer.proving import Prover
from trainer.push_sizes import PushSizes
from trainer.watch import RunAlarm

STEPS = 2


class Counting:
    """A backend whose weights are one number: how many steps it has taken."""

    vocabulary_size = 100
    modules = ("w",)
    publishes_canary = True
    push_sizes = PushSizes(full=400, adapter=40)

    def __init__(self) -> None:
        self.steps = 0
        self.observed: list[float] = []
        self.during_step = lambda: None

    def observe(self, divergence: float) -> None:
        self.observed.append(divergence)

    def step(self, samples: Sequence[Sample], learning_rate: float) -> StepResult:
        self.during_step()
        self.steps += 1
        return StepResult({"loss": 0.0, "tokens": float(len(samples))}, [], skipped=False)

    def export(self, path: Path) -> str:
        weight = {"base_model.model.w.lora_A.weight": torch.full((1, 1), float(self.steps))}
        return write_adapter(path, weight, {"r": 1, "lora_alpha": 1, "target_modules": ["w"]})

    def export_final(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, folder: Path) -> None:
        save_file({"steps": torch.tensor([self.steps])}, folder / "weights.safetensors")

    def logprobs(self, tokens: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        return [np.full(len(sequence) - 1, -float(self.steps), np.float32) for sequence in tokens]

    def canary(self, path: Path, seed: int, tokens: Sequence[np.ndarray]) -> Canary:
        scores = self.logprobs(tokens)
        return Canary(self.export(path), [score + 3 for score in scores], scores)

    def load(self, folder: Path) -> None:
        raise NotImplementedError


class Directory:
    """The places of a run directory that a learner writes to."""

    def __init__(self, path: Path) -> None:
        self.path, self.adapters, self.checkpoints = path, path / "adapters", path / "checkpoints"
        self.metrics_path, self.samples_path, self.summary_path, self.curve_path = (
            path / name for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "curve.png")
        )
        self.adapters.mkdir()


class Context:
    def __init__(self, config: Config, path: Path) -> None:
        self.config, self.directory, self.stopping = config, Directory(path), StopEvent()
        self.watchdog = Watchdog()


class Run:
    """Buffer and store in threads, a node that answers every lease, and a learner to be run in the test's thread."""

    def __init__(self, path: Path) -> None:
        self.house = House(path)
        config = self.house.config
        self.context = Context(config, path)
        store_endpoint = f"ipc://{path / 's'}"
        self._store_server = Server(store_endpoint, run=RUN, token=TOKEN, name="store")
        self.files = PolicyFiles(path / "store", RUN, 1)
        self._store_stopping = StopEvent()  # its own: a buffer that leaves must not take the store along
        store_context: Any = StoreContext(config, self._store_stopping, self.house.exporter, self.house.watchdog)
        self._store = StoreService(store_context, self._store_server, self.files)
        self._threads = [threading.Thread(target=self._store.serve, daemon=True)]
        self.backend = Counting()
        self.buffer = self.house.client("trainer", "trainer")
        self.store = Client(store_endpoint, run=RUN, token=TOKEN, role="trainer", name="trainer", peer="store")
        self._threads[0].start()
        self.store.connect(PATIENCE_S)
        context: Any = self.context
        writers = [MetricsWriter(path) for path in (context.directory.metrics_path, context.directory.samples_path)]
        self.learner = Learner(context, self.backend, State(), self.buffer, self.store, *writers, FINGERPRINT)
        self._over = threading.Event()
        node = threading.Thread(target=self._work, daemon=True)
        self._threads.append(node)
        node.start()

    def _work(self) -> None:
        node = self.house.client("node", "node")
        node.send(NodeReady("torch", 8, FINGERPRINT, 1e-3))
        while (newest := self.house.service.status().newest) is None:
            if self._over.wait(0.01):  # a test that ends sooner would leave a thread that never rests
                return
        prover = Prover(Counting(), self.context.config.run.seed)
        node.send(NodeHolds(*prover.canary(self.context.directory.path / "canary")))
        node.send(NodeServing(newest, 1, 1.0, prover.prove("")))
        node.send(NodeWants(100))
        while True:
            message = node.receive(PATIENCE_S, "work").message
            if isinstance(message, Stop):
                node.close()
                return
            if isinstance(message, Leases):
                deliver(node, list(message.leases), newest)

    def looks_at_the_pools_after_every_step(self) -> None:
        """Which is due once a second, and all steps of a test may take less."""
        self.backend.during_step = lambda: setattr(self.learner._talk, "_status_asked", float("-inf"))

    def close(self) -> None:
        self._over.set()
        self.house.close()
        self._store_stopping.set()
        self.store.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._store_server.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def test_a_learner_that_is_told_to_stop_during_a_step_checkpoints_the_version_its_weights_have(run):
    run.backend.during_step = run.context.stopping.set
    run_learner(run.learner)
    found = find_latest(run.context.directory.checkpoints)
    state = msgspec.convert(found.state, State, str_keys=True)
    assert load_file(found.folder / "weights.safetensors")["steps"].item() == 1
    assert found.version == state.version == state.progress.confirmed_batches == 1
    assert state.progress.ledger["trained"] == 4
    assert [record["step"] for record in steps_of(read_metrics(run.context.directory.metrics_path))] == [0]


def test_a_learner_records_the_pools_and_some_trajectories_beside_its_steps(run):
    run_learner(run.learner)
    records = read_metrics(run.context.directory.metrics_path)
    pools = [record["pools"] for record in records if "pools" in record]
    assert pools[-1]["ledger"]["trained"] == 8
    assert [node["name"] for node in pools[-1]["nodes"]] == ["node"]
    first = steps_of(records)[0]
    assert (first["in_flight_ages"], first["in_queue_ages"]) == ([4], [4])
    assert first["rollout_s"] > 0
    assert first["train_s"] <= first["cycle_s"] <= first["step_s"]
    samples = read_metrics(run.context.directory.samples_path)
    assert {sample["step"] for sample in samples} == set(range(STEPS))


def test_what_nodes_diverge_by_is_told_to_the_backend_once(run):
    run.looks_at_the_pools_after_every_step()
    run_learner(run.learner)
    records = read_metrics(run.context.directory.metrics_path)
    shown = [k3 for record in records if "pools" in record for *_, k3 in record["pools"]["mismatches"]]
    assert shown
    assert run.backend.observed == shown


def test_a_learner_that_goes_on_at_the_same_buffer_tells_of_none_that_its_past_has_told(run):
    run.looks_at_the_pools_after_every_step()
    run_learner(run.learner)
    state = msgspec.convert(find_latest(run.context.directory.checkpoints).state, State, str_keys=True)
    status, again = run.house.service.status(), Counting()
    assert 0 < state.seen.mismatches <= status.mismatch_count
    writers = [run.learner._metrics, run.learner._samples]
    Learner(run.context, again, state, run.buffer, run.store, *writers, FINGERPRINT)._take_in_passing(status)
    assert again.observed == run.backend.observed[state.seen.mismatches :]


def test_a_learner_that_is_done_leaves_a_summary_whose_ledger_balances(run):
    run_learner(run.learner)
    summary = msgspec.json.decode(run.context.directory.summary_path.read_bytes())
    assert summary["steps"] == STEPS
    assert summary["ledger"]["issued"] == summary["ledger"]["trained"] == 8
    assert run.context.directory.curve_path.exists()


def test_a_learner_whose_buffer_leaves_ends_with_the_buffers_words(run, monkeypatch):
    monkeypatch.setattr("buffer.service.PARTING_S", PATIENCE_S)  # it stays until the words are read
    run.backend.during_step = run.house.stopping.set
    with pytest.raises(Exception, match="the buffer was told to stop"):
        run_learner(run.learner)


def test_a_checkpoint_keeps_the_evaluations_that_are_not_reported_yet(tmp_path: Path) -> None:
    request = EvalRequest(PolicyId("main", 2, "ab" * 32), 8, SamplingParams(0.0, 12), 60.0)
    state = State(version=3, digest="cd" * 32, evaluating=(request,))
    write_checkpoint(tmp_path, 3, Counting().save, msgspec.to_builtins(state, str_keys=True))
    found = find_latest(tmp_path)
    assert found is not None
    assert msgspec.convert(found.state, State, str_keys=True) == state


def test_a_learner_lifts_the_pin_of_an_evaluation_that_a_past_it_does_not_know_has_asked_for(run):
    """A trainer that died after a checkpoint asked for it; the buffer has gone on with it."""
    given_up = PolicyId("main", 5, "ab" * 32)
    run.files.pin(given_up, True)
    run.learner._take_in_passing(EvalResult(given_up, 8, 0.5, 0, 1.0))
    run.store.flush(PATIENCE_S)
    assert given_up not in run.files._pins


def test_a_step_that_is_not_finite_ends_the_run_with_an_alarm_and_without_a_checkpoint(run):
    def explode() -> None:
        raise FloatingPointError("after 0 optimiser steps: loss nan, gradient norm nan")

    run.backend.during_step = explode
    with pytest.raises(RunAlarm, match=r"alarm: the step from version 0.*loss nan.*lower trainer.learning_rate"):
        run_learner(run.learner)
    assert find_latest(run.context.directory.checkpoints) is None


def test_a_step_beyond_an_alarms_bound_is_recorded_and_no_checkpoint_is_made_of_it(run):
    step = run.backend.step
    run.backend.step = lambda samples, rate: StepResult(step(samples, rate).metrics | {"k3": float("inf")}, [], False)
    with pytest.raises(RunAlarm, match=r"alarm: step 0: not finite: k3 inf"):
        run_learner(run.learner)
    assert [record["step"] for record in steps_of(read_metrics(run.context.directory.metrics_path))] == [0]
    assert find_latest(run.context.directory.checkpoints) is None

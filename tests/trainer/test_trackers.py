"""Trackers with the real packages: what was written is read back from TensorBoard's and W&B's own files."""

from __future__ import annotations

import json
import logging
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from async_rl.config import Config, ModelConfig, RunConfig
from async_rl.errors import AsyncRLError
from async_rl.run import checks
from async_rl.run.checks import check_trackers
from async_rl.run.directory import RunDirectory
from async_rl.run.metrics import MetricsWriter, read_metrics
from async_rl.run.process import PoolContext
from trainer.trackers import Records, TensorBoard, open_trackers, tracked

KEY = "0123456789abcdef" * 2 + "01234567"
STEP = {
    "step": 4, "version": 5, "time_s": 9.5, "reward": 0.25, "loss": math.nan, "skipped": False, "trained": 8,
    "staleness_tokens": [10, 2], "nodes": {"node-0": 3, "node-1": 5}, "note": "words", "reward_missing": None,
}  # fmt: skip
EVAL = {"time_s": 9.9, "eval": {"version": 4, "reward": 0.5, "n": 32, "cancelled": 0}}
POOLS = {"time_s": 9.9, "pools": {"uptime_s": 3.0}}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "90")  # its process may be slow to start where the machine is busy
    monkeypatch.setattr("trainer.trackers.WANDB_START_S", 90.0)
    monkeypatch.setattr("trainer.trackers.WANDB_END_S", 90.0)
    for place in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "wandb-home"))


@pytest.fixture
def context(tmp_path: Path) -> Iterator[PoolContext]:
    config = Config(
        run=RunConfig(name="small", trackers=("tensorboard", "wandb")),
        task={"kind": "digit_sort"},
        model=ModelConfig(path=str(tmp_path)),
    )
    directory = RunDirectory.create(tmp_path / "run-7", config)
    yield PoolContext(config, directory, "trainer")
    directory.remove_sockets()


def write(context: PoolContext, *records: dict[str, Any], version: int = 0) -> None:
    with Records(MetricsWriter(context.directory.metrics_path), open_trackers(context, version)) as writer:
        for record in records:
            writer.write(record)


def tensorboard(context: PoolContext) -> dict[str, list[tuple[int, float]]]:
    """(version, value) by tag, as TensorBoard itself reads them."""
    events = EventAccumulator(str(context.directory.path / "tensorboard")).Reload()
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


BLOCK = 1 << 15


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB; fragments with
    checksum, length and kind, of which 1 is whole and 4 the last of several)."""
    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"[: len(data)]
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):  # half written
            return
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def whole_records(path: Path, patience_s: float = 60.0) -> list[Any]:
    """W&B's own process writes the file, and may be a little behind."""
    deadline = time.monotonic() + patience_s
    while True:
        records = list(wandb_records(path))
        if any(record.HasField("exit") for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.1)


def wandb_runs(context: PoolContext) -> list[tuple[Any, list[dict[str, Any]]]]:
    """What W&B would send: each session's run, and its rows."""
    sessions = []
    for path in sorted(context.directory.path.glob("wandb/offline-run-*/*.wandb")):
        records = whole_records(path)
        (run,) = (record.run for record in records if record.HasField("run"))
        rows = [
            {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        sessions.append((run, rows))
    return sessions


@pytest.mark.timeout(300)
def test_both_trackers_hold_every_number_of_steps_and_evaluations_by_version(context: PoolContext) -> None:
    write(context, STEP, POOLS, EVAL)
    step = {
        "train/time_s": 9.5, "train/reward": 0.25, "train/skipped": 0.0, "train/trained": 8.0,
        "staleness_tokens/0": 10.0, "staleness_tokens/1": 2.0, "nodes/node-0": 3.0, "nodes/node-1": 5.0,
    }  # fmt: skip
    evaluation = {"eval/reward": 0.5, "eval/n": 32.0, "eval/cancelled": 0.0}
    assert tensorboard(context) == {tag: [(5, value)] for tag, value in step.items()} | {
        tag: [(4, value)] for tag, value in evaluation.items()
    }
    ((run, rows),) = wandb_runs(context)
    assert (run.project, run.run_id, run.display_name) == ("small", context.directory.run_id, "run-7")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["run"]["trackers"] == ["tensorboard", "wandb"]
    kept = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert kept == [{**step, "version": 5}, {**evaluation, "version": 4}]
    assert [record.get("eval") for record in read_metrics(context.directory.metrics_path)] == [None, None, EVAL["eval"]]


@pytest.mark.timeout(300)
def test_a_resumed_run_goes_on_where_its_checkpoint_was_in_both(context: PoolContext) -> None:
    write(context, *({"step": v - 1, "version": v, "reward": 0.1 * v} for v in (1, 2, 3)))
    write(context, *({"step": v - 1, "version": v, "reward": 0.2 * v} for v in (3, 4)), version=2)
    assert tensorboard(context)["train/reward"] == [(1, 0.1), (2, 0.2), (3, 0.6), (4, 0.8)]
    sessions = wandb_runs(context)
    assert len(sessions) == 2
    assert {run.run_id for run, _ in sessions} == {context.directory.run_id}
    assert [row["version"] for _, rows in sessions for row in rows] == [1, 2, 3, 3, 4]


@pytest.mark.timeout(300)
def test_the_key_is_in_no_file_of_the_run_and_in_no_log(
    context: PoolContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_settings: object) -> None:
        raise RuntimeError(f"the server does not like {KEY}")

    with caplog.at_level(logging.DEBUG):
        write(context, STEP)
        monkeypatch.setattr("wandb.init", fails)
        write(context, STEP)
    assert "the server does not like …" in caplog.text
    assert KEY not in caplog.text
    files = [path for path in context.directory.path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


class Failing:
    """Hears one record well."""

    name = "failing"

    def __init__(self) -> None:
        self.heard = 0

    def write(self, record: Any) -> None:
        self.heard += 1
        if self.heard > 1:
            raise OSError("no space left")

    def close(self, failed: bool) -> None:
        raise AssertionError("it was given up before")


def test_a_tracker_that_fails_is_given_up_with_one_line_and_the_others_hear_the_rest(
    context: PoolContext, caplog: pytest.LogCaptureFixture
) -> None:
    failing, board = Failing(), TensorBoard(context.directory.path / "tensorboard", 0)
    with Records(MetricsWriter(context.directory.metrics_path), [failing, board]) as writer:
        for version in (1, 2, 3):
            writer.write({"step": version - 1, "version": version, "reward": 0.5})
    assert failing.heard == 2
    assert [message for message in caplog.messages if "failing" in message] == [
        "failing is given up, the run goes on without it: OSError: no space left"
    ]
    assert [version for version, _ in tensorboard(context)["train/reward"]] == [1, 2, 3]
    assert len(read_metrics(context.directory.metrics_path)) == 3


def test_a_tracker_that_cannot_start_is_left_out(context: PoolContext, caplog: pytest.LogCaptureFixture) -> None:
    (context.directory.path / "tensorboard").write_text("a file where the folder should be")
    config = Config(run=RunConfig(trackers=("tensorboard",)), task=context.config.task, model=context.config.model)
    assert open_trackers(PoolContext(config, context.directory, "trainer"), 0) == []
    assert "tensorboard is given up" in caplog.text


def test_a_metrics_file_that_cannot_be_written_is_not_survived(context: PoolContext) -> None:
    file = MetricsWriter(context.directory.metrics_path)
    with Records(file, []) as writer:
        file.close()
        with pytest.raises(ValueError, match="closed file"):
            writer.write(STEP)


def test_a_package_that_is_missing_is_one_error_with_the_command_that_installs_it(
    context: PoolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(context.config)
    monkeypatch.setattr(checks, "TRACKERS", {"tensorboard": "no_such_x", "wandb": "no_such_y"})
    with pytest.raises(AsyncRLError, match=r"no_such_x, no_such_y.*pip install '\.\[tensorboard,wandb\]'"):
        check_trackers(context.config)
    with pytest.raises(AsyncRLError, match="not installed here"):
        open_trackers(context, 0)


def test_each_set_of_evaluation_is_tracked_under_its_name_with_its_intervals() -> None:
    hard = {"set": "hard", "version": 4, "reward": 0.2, "interval": [0.1, 0.4], "n": 4, "pass": {
        "2": {"value": 0.3, "interval": [0.2, 0.5], "n": 2}, "8": {"value": None, "interval": None, "n": 0}}}
    ((version, numbers),) = tracked({"eval": hard})
    assert version == 4
    assert numbers == {
        "eval/hard/reward": 0.2, "eval/hard/reward_low": 0.1, "eval/hard/reward_high": 0.4, "eval/hard/n": 4,
        "eval/hard/pass@2": 0.3, "eval/hard/pass@2_low": 0.2, "eval/hard/pass@2_high": 0.5,
    }  # fmt: skip


def test_evaluations_in_a_steps_own_line_are_tracked_too() -> None:
    record = {**STEP, "evals": [{"version": 2, "reward": 0.1, "n": 4}, {"version": 4, "reward": 0.2, "n": 4}]}
    assert [(version, numbers.get("eval/reward")) for version, numbers in tracked(record)] == [
        (5, None), (2, 0.1), (4, 0.2)
    ]  # fmt: skip

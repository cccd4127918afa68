"""A mixed, streamed, shuffled epoch on real processes, stopped and killed in its middle: what is left is trained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import real_runs

from async_rl.config import load_config
from async_rl.data.order import asked, place_of
from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.tasks.registry import instance_sources
from buffer.recorder import recorded_batches

pytest.importorskip("datasets")
pytestmark = [pytest.mark.e2e, pytest.mark.tasks, pytest.mark.timeout(1000)]

GROUPS, TABLE, STREAM, EVAL = 4, 30, 50, 8
STEPS = (TABLE + STREAM) // GROUPS  # one epoch of both
SETTINGS = ["--set", f"run.steps={STEPS}", "--set", "trainer.checkpoint_every=4", "--set", "run.eval_every=10"]
TASK = f"""
[task]
kind = "dataset"
style = "plain"

[[task.source]]
path = "table.parquet"
prompt = "question"
answer = "sorted"
weight = 3.0
eval_rows = {EVAL}

[[task.source]]
path = "stream.jsonl"
prompt = "question"
answer = "sorted"
weight = 5.0
filter = [{{ column = "question", max_length = 9 }}]
streaming = true
size = {STREAM}
block = 8
eval_rows = {EVAL}

[[task.reward]]
kind = "exact"
"""


def write_data(folder: Path) -> None:
    """Sort digits, as the base model was made for; the stream has questions that its filter takes out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    task = DigitSort(DigitSortConfig())
    made = [task.instance("train", n) for n in range(TABLE + STREAM + 2 * EVAL)]
    records = [{"question": each.prompt, "sorted": each.answer} for each in made]
    pq.write_table(pa.Table.from_pylist(records[: TABLE + EVAL]), folder / "table.parquet")
    lines = [line for each in records[TABLE + EVAL :] for line in ({"question": "0" * 20, "sorted": ""}, each)]
    (folder / "stream.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def dataset_config(shell: real_runs.Shell) -> Path:
    """The small run on the data, from the base model of the small run."""
    path = real_runs.own_task(shell, "dataset.toml", TASK)
    write_data(shell.folder)
    return path


def reached_step(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= count

    real_runs.wait_for(there, 120, f"{count} steps")


def trained(run: Path) -> dict[int, tuple[int, int]]:
    """Ticket -> (try, instance) of every batch that the journal has, from now back to the last checkpoint."""
    run_id = json.loads((run / "run.json").read_text())["run"]
    batches = recorded_batches(run / "journal", run_id, 0)
    return {group.ticket: (group.try_, group.instance) for lent in batches.values() for group in lent.groups}


def test_an_epoch_that_is_stopped_and_killed_trains_what_is_left_none_twice_and_none_lost(shell, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(shell.folder / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = shell.folder / "run"
    arguments = ["run", str(dataset_config(shell)), "--out", str(run), *SETTINGS]
    process = shell.start(*arguments, "--set", "inference.nodes=1")
    reached_step(run, 6, process)
    real_runs.kill_everything(process)
    found = trained(run)
    process = shell.start(*arguments, "--resume")
    reached_step(run, 13, process)
    real_runs.interrupt(process)
    process.communicate(timeout=150)
    after_stop = trained(run)
    code, output = shell.run(*arguments, "--resume", "--set", "inference.nodes=1", timeout=380)
    assert code == 0, output
    for later in (after_stop, trained(run)):
        assert all(later[ticket] == found[ticket] for ticket in later.keys() & found.keys())
        found |= later
    assert sorted(found) == list(range(TABLE + STREAM))
    assert {try_ for try_, _ in found.values()} == {0}
    assert sorted(instance for _, instance in found.values()) == list(range(TABLE + STREAM))
    monkeypatch.chdir(shell.folder)
    config = load_config(str(run / "config.toml"))
    sources = instance_sources(config)
    order = [asked(config.run.seed, sources, ticket) for ticket in range(TABLE + STREAM)]
    assert [found[ticket][1] for ticket in range(TABLE + STREAM)] == order
    per_batch = [sum(place_of(sources, each).source for each in order[n : n + 8]) for n in range(0, len(order), 8)]
    assert per_batch == [5] * 10
    assert real_runs.summary(run)["ledger"]["trained"] == (TABLE + STREAM) * 8

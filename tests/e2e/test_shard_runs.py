"""Whole runs on a buffer of several shards, real processes: it learns, the bound and the ledger hold over all of them,
and who is killed comes back."""

from __future__ import annotations

import statistics
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import real_runs

from async_rl.run.directory import RunDirectory
from async_rl.run.killpoints import VARIABLE
from async_rl.run.metrics import read_metrics, steps_of
from async_rl.run.status import of_directory

pytestmark = [pytest.mark.scale, pytest.mark.timeout(1000)]

BATCH = 4 * 8  # attempts of a step, in the small config
STEPS = 6
SAME = ("loss", "digest", "data", "reward", "trained", "dropped", "batch_tokens", "staleness_tokens")


def check(run: Path, steps: int, batch: int = BATCH) -> dict:
    """Every step once, every attempt in one place over all shards, and as many trained as the steps took."""
    assert [record["step"] for record in real_runs.records(run)] == list(range(steps))
    summary = real_runs.summary(run)
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert [ledger[place] for place in ("leased", "ready", "batched")] == [0, 0, 0]
    assert ledger["trained"] == steps * batch
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert real_runs.processes_of(run) == []
    return summary


def shard_process(run: Path, name: str) -> psutil.Process | None:
    for process in real_runs.processes_of(run):
        with suppress(psutil.NoSuchProcess):  # the one that was found may have ended meanwhile
            arguments = process.cmdline()
            if "buffer.service" in arguments and arguments[arguments.index("--name") + 1] == name:
                return process
    return None


def steps_reached(run: Path, count: int) -> bool:
    return (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= count


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.long), 4])
def test_reward_rises_with_the_bound_and_the_ledger_kept_over_all_shards(shell, shards):
    run = shell.folder / "learns"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", f"buffer.shards={shards}",
        "--set", "run.steps=60", "--set", "run.eval_every=60", "--set", "run.eval_samples=256",
        "--set", "buffer.groups_per_step=16", "--set", "inference.slots=64", "--set", "buffer.max_staleness=2",
        timeout=980,
    )  # fmt: skip
    assert code == 0, output
    summary = check(run, 60, 16 * 8)
    rewards = [record["reward"] for record in real_runs.records(run)]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    assert last >= first + 0.08, (first, last)
    assert summary["eval"]["last"] > summary["eval"]["first"]
    # The tickets of each batch are those that one buffer would have lent, in its order.
    assert all((run / f"journal-{shard}").is_dir() for shard in range(1, shards))


def test_a_shard_that_is_killed_comes_back_and_loses_nothing_and_status_adds_up_what_all_of_them_say(shell):
    run = shell.folder / "killed"
    started = shell.start(
        "run", str(shell.config), "--out", str(run), "--set", "buffer.shards=2", "--set", "run.steps=30"
    )
    real_runs.wait_for(lambda: steps_reached(run, 3), 240, "three steps")
    victim = shard_process(run, "buffer-1")
    assert victim is not None
    victim.kill()
    real_runs.wait_for(lambda: (found := shard_process(run, "buffer-1")) is not None and found.pid != victim.pid, 60,
                       "another one")  # fmt: skip
    real_runs.wait_for(lambda: steps_reached(run, 8), 240, "more steps")
    state = of_directory(RunDirectory.open(run))
    assert state.phase == "running"
    assert state.ledger_balances
    assert {node.name for node in state.nodes} == {"node-0", "node-1"}
    output, _ = started.communicate(timeout=750)
    assert started.returncode == 0, output
    assert "buffer-1 was killed by SIGKILL and started again" in output
    check(run, 30)


@pytest.mark.parametrize(
    "point",
    ["trainer.between-confirms:3@trainer", pytest.param("buffer.after-append:60@buffer-1", marks=pytest.mark.long)],
)
def test_a_run_survives_a_death_while_one_shard_knows_what_another_does_not(shell, point):
    run = shell.folder / "run"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "buffer.shards=2", timeout=980, **{VARIABLE: point}
    )
    name = point.partition("@")[2]
    assert f"{name} was killed by SIGKILL and started again" in output, output
    assert code == 0, output
    check(run, STEPS)


def test_a_deterministic_run_is_the_same_with_one_shard_and_with_two_and_resumes_with_as_many_only(shell):
    """The same tickets, instances and seeds, the same batches in the same order: the same weights, bit for bit."""
    seen = []
    for shards in (1, 2):
        run = shell.folder / f"exact-{shards}"
        code, output = shell.run(
            "run", str(shell.config), "--out", str(run), "--set", f"buffer.shards={shards}",
            "--set", "run.deterministic=true", "--set", "inference.handover=discard", "--set", "run.eval_every=0",
            timeout=480,
        )  # fmt: skip
        assert code == 0, output
        records = steps_of(read_metrics(run / "metrics.jsonl"))
        seen.append([{key: record[key] for key in SAME} for record in records])
    assert seen[0] == seen[1]
    code, output = shell.run(
        "run", str(shell.config), "--out", str(shell.folder / "exact-2"), "--resume", "--set", "buffer.shards=4",
        "--set", "run.steps=8",
    )  # fmt: skip
    assert code != 0
    assert "resume with buffer.shards = 2" in output, output

"""A whole run whose trainer is two processes of the torch backend, one of which is killed."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import real_runs
from rank_runs import check_finished, left_of, rank_of, versions
from real_runs import Shell, wait_for

pytestmark = [pytest.mark.scale, pytest.mark.timeout(1100)]

STEPS = 40


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def test_reward_rises_on_two_ranks_and_one_that_is_killed_costs_the_steps_since_the_last_checkpoint(
    shell: Shell,
) -> None:
    run = shell.folder / "killed"
    process = shell.start(
        "run", str(shell.config), "--out", str(run), "--set", "trainer.parallel.data=2",
        "--set", f"run.steps={STEPS}", "--set", f"run.eval_every={STEPS}", "--set", "run.eval_samples=256",
        "--set", "buffer.groups_per_step=16", "--set", "inference.slots=128",
    )  # fmt: skip
    wait_for(lambda: versions(run) >= 5 and any((run / "checkpoints").glob("v*")), 400, "five steps")
    rank = rank_of(run, 1)
    os.kill(rank.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    check_finished(run, steps=STEPS)
    assert not psutil.pid_exists(rank.pid)
    assert not list(run.glob(".ranks-*"))
    launcher = (run / "logs" / "launcher.log").read_text()
    assert "trainer could not go on (rank 1 was killed by SIGKILL; log: " in launcher
    assert "resuming from version" in (run / "logs" / "trainer.log").read_text()
    records = real_runs.records(run)
    assert [record["step"] for record in records] == list(range(STEPS))
    assert all(1 <= record["rank_imbalance"] < 1.2 for record in records)
    rewards = [record["reward"] for record in records]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    # 1,280 samples at each end, so a standard error below 0.015.
    assert last >= first + 0.05, (first, last)
    # What nodes serve is what both ranks train.
    assert all(node["last"] < 1e-4 for node in real_runs.summary(run)["parity"].values())


def test_what_is_not_offered_over_ranks_is_one_error_before_anything_starts(shell: Shell) -> None:
    ranks = ("--set", "trainer.parallel.data=2")
    mixture = ("--set", "model.tiny.experts=4", "--set", "model.tiny.experts_per_token=2")
    for more, says in (
        ((*ranks, *mixture, "--set", "model.tiny.expert_intermediate=64"), "cuts no mixture of experts over ranks"),
        ((*ranks, "--set", "trainer.parallel.tensor=2"), "[trainer.parallel] has only `data`"),
    ):
        code, output = shell.run("run", str(shell.config), "--dry-run", *more)
        assert code == 1, output
        assert says in " ".join(output.split()), output
        assert "Traceback" not in output
    assert left_of(shell.folder) == []

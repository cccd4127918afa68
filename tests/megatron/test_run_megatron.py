"""Whole runs whose trainer is four processes: services, two nodes, and a model that is spread over ranks."""

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

pytestmark = pytest.mark.timeout(1100)

MEGATRON = ("--set", "trainer.backend=megatron")
DENSE = (*MEGATRON, "--set", "trainer.parallel.tensor=2", "--set", "trainer.parallel.pipeline=2")
MIXTURE = (
    *MEGATRON, "--set", "trainer.parallel.tensor=2", "--set", "trainer.parallel.sequence=true",
    "--set", "trainer.parallel.data=2", "--set", "trainer.parallel.expert=2",
    "--set", "model.tiny.layers=2", "--set", "model.tiny.experts=8", "--set", "model.tiny.experts_per_token=2",
    "--set", "model.tiny.expert_intermediate=128",
)  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


LEARNING = (
    "--set", "run.steps=50", "--set", "run.eval_every=0", "--set", "buffer.groups_per_step=16",
    "--set", "inference.slots=128",
)  # fmt: skip


def check_learned(run: Path) -> None:
    """50 steps of LEARNING, each once, though the trainer may have been started again."""
    check_finished(run, steps=50)
    records = real_runs.records(run)
    assert [record["step"] for record in records] == list(range(50))
    rewards = [record["reward"] for record in records]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    # 1,280 samples at each end, so a standard error below 0.015.
    assert last >= first + 0.05, (first, last)
    assert real_runs.summary(run)["staleness"]["mean"] > 0
    assert {path.name for path in (run / "logs").glob("trainer*")} == {
        "trainer.log", "trainer-rank1.log", "trainer-rank2.log", "trainer-rank3.log"
    }  # fmt: skip


@pytest.mark.parametrize("layout", [pytest.param(DENSE, marks=pytest.mark.long), MIXTURE], ids=["dense", "mixture"])
def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint_and_the_model_learns_on(
    shell: Shell, layout: tuple[str, ...]
) -> None:
    run = shell.folder / "killed"
    process = shell.start("run", str(shell.config), "--out", str(run), *layout, *LEARNING)
    wait_for(lambda: versions(run) >= 5 and any((run / "checkpoints").glob("v*")), 400, "five steps")
    first = rank_of(run, 2)
    others = [rank_of(run, rank).pid for rank in (1, 3)]
    os.kill(first.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    check_learned(run)
    assert not any(psutil.pid_exists(pid) for pid in others)
    launcher = (run / "logs" / "launcher.log").read_text()
    assert "trainer could not go on (rank 2 was killed by SIGKILL; log: " in launcher
    assert "resuming from version" in (run / "logs" / "trainer.log").read_text()
    assert not list(run.glob(".ranks-*"))


def test_nodes_apply_the_updates_of_sketches_over_ranks_and_a_run_of_them_goes_on(shell: Shell) -> None:
    text = shell.config.read_text().replace("learning_rate = 2e-3", 'kind = "sketch"\nupdate_ratio = 2e-3')
    shell.config.write_text(text.replace("[inference]", '[inference]\nin_flight = "continue"'))
    run = shell.folder / "sketches"
    layout = (*MIXTURE, "--set", "trainer.parallel.data=1", "--set", "trainer.parallel.expert=1")
    for steps, more in ((4, ()), (6, ("--resume",))):
        code, output = shell.run(
            "run", str(shell.config), "--out", str(run), *layout, "--set", f"run.steps={steps}", *more, timeout=400
        )
        assert code == 0, output
        check_finished(run, steps=steps)
    assert "resuming from version 4" in (run / "logs" / "trainer.log").read_text()
    # What nodes made of the updates are the ranks' weights, so log-probabilities agree after they moved.
    parity = real_runs.summary(run)["parity"]
    assert len(parity) == 2
    assert all(node["last"] < 1e-4 for node in parity.values()), parity


@pytest.mark.long
def test_a_layout_that_does_not_fit_the_model_is_one_error(shell: Shell) -> None:
    run = shell.folder / "wrong"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), *MEGATRON, "--set", "trainer.parallel.tensor=3", timeout=400
    )
    assert code == 1
    assert "trainer failed (exit 1): [trainer.parallel] tensor = 3" in output, output
    assert "Traceback" not in output
    assert left_of(run) == []

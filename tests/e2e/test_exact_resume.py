"""What is trained again after a kill is what was trained before it; and with run.deterministic a whole run, stopped
anywhere, is the run that was not."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import real_runs

from async_rl.run.metrics import evals_of, read_metrics, steps_of

pytestmark = [pytest.mark.e2e, pytest.mark.sample, pytest.mark.timeout(600)]

STEPS = 10
# A step takes some 2.4 s: whoever kills a process between two of them has the time to.
SLOWLY = ["--set", "inference.slots=8", "--set", "inference.max_tokens_per_second=60"]
SETTINGS = ["--set", f"run.steps={STEPS}", "--set", "trainer.checkpoint_every=4", "--set", "run.eval_every=4"]
DETERMINISTIC = ["--set", "run.deterministic=true", "--set", "inference.handover=discard"]
REPLAY = ["--set", "buffer.order=replay", "--set", "buffer.reuse=2"]
SAME = ("loss", "digest", "data", "reward", "trained", "reused", "dropped", "batch_tokens", "staleness_tokens", "k3")


def steps(path: Path) -> dict[int, dict]:
    """What must be the same of each step of a metrics file."""
    found = steps_of(read_metrics(path)) if path.exists() else []
    return {record["step"]: {key: record[key] for key in SAME} for record in found}


def evaluations(path: Path) -> list[tuple[int, float, int]]:
    return [(each["version"], each["reward"], each["n"]) for each in evals_of(read_metrics(path))]


def reached_step(run: Path, count: int, process) -> None:
    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return len(steps(run / "metrics.jsonl")) >= count

    real_runs.wait_for(there, 300, f"{count} steps")


def finish(shell, *arguments: str) -> None:
    code, output = shell.run(*arguments, timeout=400)
    assert code == 0, output


def trainer_of(run: Path) -> psutil.Process:
    (found,) = [each for each in real_runs.processes_of(run) if "trainer.learner" in each.cmdline()]
    return found


@pytest.mark.parametrize("order", [pytest.param([], marks=pytest.mark.long), REPLAY], ids=["fifo", "replay"])
def test_after_kill_9_of_everything_the_batches_since_the_checkpoint_are_trained_again_bit_for_bit(shell, order):
    """Groups that are used again included: they come out of the journal, too."""
    run = shell.folder / "killed"
    arguments = ["run", str(shell.config), "--out", str(run), *SETTINGS, *order]
    process = shell.start(*arguments, *SLOWLY)
    reached_step(run, 6, process)
    real_runs.kill_everything(process)
    before = run / "before.jsonl"
    shutil.copy(run / "metrics.jsonl", before)
    old = steps(before)
    assert max(old) >= 5
    finish(shell, *arguments, "--resume")
    new = steps(run / "metrics.jsonl")
    assert sorted(new) == list(range(STEPS))
    assert "resuming from version 4" in (run / "logs" / "trainer.log").read_text()
    assert {step: new[step] for step in old} == old
    # Where all rewards of a batch are equal, as those of so few attempts may be, it moves nothing.
    assert len({record["digest"] for record in new.values()}) > STEPS / 2
    assert [record["reused"] > 0 for record in new.values()] == [bool(order) and step > 0 for step in range(STEPS)]


def test_a_trainer_that_is_killed_alone_trains_again_bit_for_bit_while_the_others_go_on(shell):
    run = shell.folder / "trainer-killed"
    process = shell.start("run", str(shell.config), "--out", str(run), *SETTINGS, *SLOWLY)
    reached_step(run, 6, process)
    trainer = trainer_of(run)
    os.kill(trainer.pid, signal.SIGSTOP)
    shutil.copy(run / "metrics.jsonl", run / "before.jsonl")
    trainer.kill()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    old, new = steps(run / "before.jsonl"), steps(run / "metrics.jsonl")
    assert max(old) >= 5
    assert {step: new[step] for step in old} == old
    assert sorted(new) == list(range(STEPS))
    assert "started again" in output


def check_the_same_run(shell, plain: Path, run: Path) -> None:
    assert steps(run / "metrics.jsonl") == steps(plain / "metrics.jsonl")
    assert evaluations(run / "metrics.jsonl") == evaluations(plain / "metrics.jsonl")
    final = "adapters/final/adapter_model.safetensors"
    assert (run / final).read_bytes() == (plain / final).read_bytes()


def test_a_deterministic_run_stopped_and_killed_is_the_one_that_went_through_with_fewer_nodes(shell):
    """Ctrl-C in the midst, then kill -9 of everything; other slots and another number of nodes."""
    arguments = ["run", str(shell.config), *SETTINGS, *DETERMINISTIC]
    plain, run = shell.folder / "plain", shell.folder / "stopped"
    finish(shell, *arguments, "--out", str(plain), "--set", "inference.nodes=1", "--set", "inference.slots=48")
    assert sorted(steps(plain / "metrics.jsonl")) == list(range(STEPS))
    assert [version for version, _, _ in evaluations(plain / "metrics.jsonl")] == [0, 4, 8, 10]
    process = shell.start(*arguments, *SLOWLY, "--out", str(run))
    reached_step(run, 3, process)
    real_runs.interrupt(process)
    process.communicate(timeout=120)
    process = shell.start(*arguments, *SLOWLY, "--out", str(run), "--resume")
    reached_step(run, 6, process)
    real_runs.kill_everything(process)
    finish(shell, *arguments, "--out", str(run), "--resume")
    check_the_same_run(shell, plain, run)
    for record in steps(run / "metrics.jsonl").values():
        assert sum(count > 0 for count in record["staleness_tokens"]) == 1  # of exactly one version


@pytest.mark.faults
@pytest.mark.timeout(2250)
def test_a_deterministic_run_killed_at_every_kind_of_place_is_the_one_that_went_through(shell):
    """Everything or one process, again and again, over 24 steps with two nodes, while tickets are tried again."""
    more = ["--set", "run.steps=24", "--set", "trainer.checkpoint_every=5", "--set", "buffer.zero_variance=refill"]
    arguments = ["run", str(shell.config), *SETTINGS, *DETERMINISTIC, *more]
    plain, run = shell.folder / "plain", shell.folder / "killed"
    finish(shell, *arguments, "--out", str(plain))
    process = shell.start(*arguments, "--out", str(run))
    for step, module in [(2, ""), (4, "inference.node"), (7, "trainer.learner"), (9, ""), (11, "buffer.service"),
                         (14, "buffer.store"), (16, "^C"), (20, "")]:  # fmt: skip
        reached_step(run, step, process)
        if module in ("", "^C"):
            if module:
                real_runs.interrupt(process)
                process.communicate(timeout=120)
            else:
                real_runs.kill_everything(process)
            process = shell.start(*arguments, "--out", str(run), "--resume")
        else:
            next(each for each in real_runs.processes_of(run) if module in each.cmdline()).kill()
            time.sleep(0.5)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_the_same_run(shell, plain, run)

"""`kill -9` at every named point, and at random moments: the run completes, the books balance, nothing trains twice."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import psutil
import pytest
from real_runs import Shell, processes_of, records, summary, wait_for

from async_rl.run.killpoints import POINTS, VARIABLE

BATCH = 4 * 8  # attempts of a step, in the small config
STEPS = 6
LONG_STEPS = 240
KILLS = 20
POOLS = ("store", "buffer", "trainer", "node-0", "node-1")

# The passing at which each point is deadly: late enough that there is something to lose.
PASSES = {
    "buffer.before-append": 60,
    "buffer.after-append": 61,
    "buffer.after-effects": 50,
    "node.before-results": 4,
    "trainer.in-checkpoint": 2,
    "buffer.segment-begun": 1,
}
SKETCH = (
    "--set", "trainer.kind=sketch", "--set", "trainer.learning_rate=2e-4", "--set", "trainer.update_ratio=2e-3",
    "--set", "inference.in_flight=continue",
)  # fmt: skip
SAMPLE = ("buffer.after-append", "trainer.after-confirm", "store.after-index")
# Hundreds of megabytes are needed for the one (tests/buffer/test_recorder.py), and a node that has missed versions for
# the other (tests/inference/test_delivery.py).
RARE = {"buffer.segment-deleted", "node.mid-route"}
ROUTES = ("node.before-flip", "trainer.after-confirm", "trainer.after-upload", "store.after-index")
LATE = 3  # everywhere else


def check(run: Path, steps: int) -> None:
    """Every step once, every attempt in one place, and as many trained as the steps took."""
    assert [record["step"] for record in records(run)] == list(range(steps))
    ledger = summary(run)["ledger"]
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert [ledger[place] for place in ("leased", "ready", "batched")] == [0, 0, 0]
    assert ledger["trained"] == steps * BATCH
    assert summary(run)["staleness"]["max"] <= summary(run)["staleness"]["bound"]


def served_by(run: Path, node: str) -> list[tuple[int, str]]:
    """(version, digest's beginning)."""
    log = (run / "logs" / f"{node}.log").read_text()
    return [(int(version), digest) for version, digest in re.findall(r"serving policy (\d+)-([0-9a-f]{8})", log)]


def die_at(shell: Shell, point: str, *options: str) -> None:
    run = shell.folder / "run"
    pool = point.partition(".")[0]
    name = "node-0" if pool == "node" else pool
    plan = f"{point}:{PASSES.get(point, LATE)}@{name}"
    code, output = shell.run("run", str(shell.config), "--out", str(run), *options, timeout=750, **{VARIABLE: plan})
    assert f"{name} was killed by SIGKILL and started again" in output, output
    assert code == 0, output
    check(run, STEPS)
    assert processes_of(run) == []


@pytest.mark.e2e
@pytest.mark.timeout(800)
@pytest.mark.parametrize("point", SAMPLE)
def test_a_run_survives_a_death_where_it_matters_most(shell, point):
    die_at(shell, point)


@pytest.mark.faults
@pytest.mark.timeout(800)
@pytest.mark.parametrize("point", sorted(POINTS.keys() - RARE - set(SAMPLE)))
def test_a_run_survives_a_death_at_every_point(shell, point):
    die_at(shell, point)


@pytest.mark.faults
@pytest.mark.timeout(800)
@pytest.mark.parametrize("point", ROUTES)
def test_a_run_with_factor_updates_survives_a_death_on_their_way(shell, point):
    """And what nodes serve is what the trainer made: a node that serves anything else is quarantined, and says so."""
    die_at(shell, point, *SKETCH)
    run = shell.folder / "run"
    made = {record["step"] + 1: record["digest"][:8] for record in records(run)}
    served = [each for node in ("node-0", "node-1") for each in served_by(run, node) if each[0]]
    assert max(version for version, _ in served) == STEPS
    assert all(made[version] == digest for version, digest in served)
    assert all("goes on serving" not in (run / "logs" / f"{node}.log").read_text() for node in ("node-0", "node-1"))


@pytest.mark.faults
@pytest.mark.timeout(1500)
def test_a_run_survives_twenty_deaths_at_random_moments(shell):
    """Of any process, some while another is still on its way back."""
    rng = random.Random(7)
    run = shell.folder / "run"
    started = shell.start(
        "run", str(shell.config), "--out", str(run), "--set", f"run.steps={LONG_STEPS}", "--set", "run.eval_every=40",
        "--set", "launch.restarts=20",
    )  # fmt: skip
    killed = 0
    while killed < KILLS and started.poll() is None:
        time.sleep(rng.uniform(1.0, 6.0))
        living = [process for process in processes_of(run) if pool_of(process) in POOLS]
        if living:
            rng.choice(living).kill()
            killed += 1
    output, _ = started.communicate(timeout=1200)
    assert killed == KILLS, "the run was over before everybody had died"
    assert started.returncode == 0, output
    check(run, LONG_STEPS)


def pool_of(process: psutil.Process) -> str:
    """The name of a pool's process; empty for its workers and for the launcher."""
    try:
        arguments = process.cmdline()
        module = next((arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word == "-m"), "")
        if module in ("buffer.store", "buffer.service", "trainer.learner", "inference.node"):
            return arguments[arguments.index("--name") + 1]
    except (psutil.Error, ValueError):
        pass
    return ""


@pytest.mark.faults
@pytest.mark.timeout(1000)
def test_a_run_whose_every_process_was_killed_goes_on_with_resume(shell):
    run = shell.folder / "run"
    started = shell.start("run", str(shell.config), "--out", str(run))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 3, 240, "three steps")
    for process in [psutil.Process(started.pid), *processes_of(run)]:
        process.kill()
    started.wait(30)
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--resume", timeout=600)
    assert code == 0, output
    check(run, STEPS)

"""Whole runs whose policies change the model's own weights: factor updates, and snapshots, to two nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import real_runs
from real_runs import Shell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SKETCH = (
    "--set", "trainer.kind=sketch", "--set", "trainer.learning_rate=2e-4", "--set", "trainer.update_ratio=2e-3",
    "--set", "inference.in_flight=continue",
)  # fmt: skip
SERVING = re.compile(r"serving policy (\d+)-([0-9a-f]{8})")


def served(run: Path, node: str) -> list[tuple[int, str]]:
    """(version, digest's beginning), in the order in which the node's engine served them."""
    text = (run / "logs" / f"{node}.log").read_text()
    return [(int(version), digest) for version, digest in SERVING.findall(text)]


def check(run: Path, steps: int) -> dict[str, Any]:
    """It ended well; every node came to the trainer's weights, and was never set aside for others."""
    summary = real_runs.summary(run)
    ledger = summary["ledger"]
    assert summary["steps"] == steps
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    made = {record["step"] + 1: record["digest"][:8] for record in real_runs.records(run)}
    ends = [seen[-1] for node in ("node-0", "node-1") if (seen := served(run, node))]
    assert (steps, made[steps]) in ends  # the last evaluation needs one of them
    assert all(made[version] == digest for version, digest in ends if version)
    for node in ("node-0", "node-1"):
        log = (run / "logs" / f"{node}.log").read_text()
        assert "quarantined" not in log
        assert "goes on serving" not in log
    assert real_runs.processes_of(run) == []
    return summary


def test_the_sketch_quickstart_sends_factor_updates_to_two_nodes_and_evaluates(shell: Shell) -> None:
    run = shell.folder / "run"
    code, output = shell.run(
        "run", "quickstart-sketch", "--set", "run.steps=20", "--set", "run.eval_every=10",
        "--set", "trainer.snapshot_every=8", "--out", str(run), timeout=500,
    )  # fmt: skip
    assert code == 0, output
    summary = check(run, 20)
    assert summary["push_bytes"] < summary["push_bytes_full"] / 10
    assert summary["push_bytes"] < summary["push_bytes_adapter"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["eval"] for line in lines if line.get("eval")]
    assert [(each["version"], each["n"]) for each in evaluated] == [(0, 512), (10, 512), (20, 512)]
    assert "AutoModelForCausalLM.from_pretrained" in output
    assert "PeftModel" not in output


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.long), "sketch"])
def test_every_version_may_be_a_snapshot(shell: Shell, kind: str) -> None:
    run = shell.folder / "run"
    own = (
        ["trainer.learning_rate=2e-4"]
        if kind == "full"
        else ["trainer.learning_rate=2e-4", "trainer.publish=snapshots"]
    )
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", f"trainer.kind={kind}",
        "--set", "inference.in_flight=recompute", *(word for key in own for word in ("--set", key)), timeout=500,
    )  # fmt: skip
    assert code == 0, output
    summary = check(run, 6)
    assert summary["push_bytes"] >= summary["push_bytes_full"]


@pytest.mark.sample
def test_a_sketch_run_that_was_ended_goes_on_with_resume_and_its_nodes_follow(shell: Shell) -> None:
    run = shell.folder / "run"
    started = shell.start("run", str(shell.config), "--out", str(run), *SKETCH)
    real_runs.wait_for(
        lambda: (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= 3, 200, "three steps"
    )
    real_runs.interrupt(started)
    started.wait(120)
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--resume", *SKETCH, timeout=500)
    assert code == 0, output
    check(run, 6)

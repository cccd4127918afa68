"""Whole runs: what a node computes is compared with the trainer before the first step, and told."""

from __future__ import annotations

import json

import pytest
import real_runs
from real_runs import Shell

from async_rl.run.status import state_of
from async_rl.run.status_text import state_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_run_whose_engine_computes_in_another_dtype_ends_before_its_first_step_with_one_message(shell: Shell) -> None:
    run = shell.folder / "refused"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "inference.nodes=1",
        "--set", "inference.dtype=bfloat16", "--set", "inference.logprob_bound=0.001",
    )  # fmt: skip
    assert code == 1
    (message,) = [line for line in output.splitlines() if "no step was taken" in line]
    for words in ("node-0: canary 0-", "differ from the trainer's by up to 0.", "its engine's bound is 0.001"):
        assert words in message
    assert "[inference] dtype" in message
    records = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    assert [line for line in map(json.loads, records) if "reward" in line] == []


@pytest.mark.long
def test_a_run_tells_how_far_its_nodes_were_from_the_trainer_when_they_began(shell: Shell) -> None:
    run = shell.folder / "told"
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--set", "run.steps=2")
    assert code == 0, output
    parity = real_runs.summary(run)["parity"]
    assert sorted(parity) == ["node-0", "node-1"]
    for node in parity.values():
        assert (node["engine"], node["bound"], node["first_version"]) == ("torch", 1e-3, 0)
        assert 0 < node["canary"] < 1e-4
        assert 0 <= node["first"] < 1e-4
    log = (run / "logs" / "node-0.log").read_text()
    told = [line for line in log.splitlines() if "log-probabilities differ from the trainer's by" in line]
    assert ["canary 0-" in told[0], "main 0-" in told[1], len(told)] == [True, True, 2]
    assert all(line.endswith("nats at most, within the bound of 0.001") for line in told)
    assert "parity    torch canary " in state_text(state_of(str(run)))
    assert "parity    torch canary " in output
    assert "Served against trained" in (run / "report.html").read_text()

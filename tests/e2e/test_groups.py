"""Runs whose nodes are of different groups: all on this machine, and pools by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import real_runs
from real_runs import Shell, summary

from async_rl.run.status import state_of

GROUPS = 'inference.group=[{name = "few", nodes = 1, slots = 8}, {name = "many", slots = 24, in_flight = "recompute"}]'
SETTINGS = ["--set", GROUPS, "--set", "run.eval_every=0", "--set", "buffer.heartbeat=2"]
SLOTS = {"few-0": 8, "many-0": 24, "many-1": 24}


def slots(run: Path) -> dict[str, int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    pools: list[dict[str, Any]] = [record["pools"] for record in map(json.loads, lines) if "pools" in record]
    return {node["name"]: node["slots"] for each in pools for node in each["nodes"]}


@pytest.mark.timeout(400)
def test_each_node_of_a_run_has_its_groups_settings_and_name(shell: Shell) -> None:
    run = shell.folder / "run"
    slowly = ["--set", "run.steps=20", "--set", "inference.max_tokens_per_second=60"]  # until all three are there
    code, output = shell.run("run", str(shell.config), "--out", str(run), *SETTINGS, *slowly, timeout=300)
    assert code == 0, output
    assert slots(run) == SLOTS
    assert summary(run)["ledger_balances"]
    assert {path.stem for path in (run / "logs").glob("*.log")} >= SLOTS.keys()


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_node_started_by_hand_says_of_which_group_it_is(shell: Shell) -> None:
    run = shell.folder / "run"
    common = [str(shell.config), "--out", str(run), *SETTINGS]
    code, output = shell.run("infer", *common)
    assert code == 1
    assert "choose one with --group NAME, of few, many" in output
    shell.start("buffer", *common)
    real_runs.wait_for((run / "run.json").exists, 60, "the run directory")
    shell.start("infer", *common, "--group", "many", "--name", "mine")
    real_runs.wait_for(lambda: [node.slots for node in state_of(str(run)).nodes] == [24], 120, "the node")
    code, output = shell.run("train", *common)
    assert code == 0, output
    assert slots(run) == {"mine": 24}

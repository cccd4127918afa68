"""A node whose engine holds another policy than the trainer's: named, set aside, and the run goes on without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import real_runs
from real_runs import Shell

from async_rl.run.status import state_of

pytestmark = pytest.mark.timeout(750)

HERE = Path(__file__).resolve().parents[1] / "support"
FAULTS = {
    # fault: (from which version on, the words of the cause)
    "scaled": (2, "its log-probabilities on the probe differ"),
    "empty": (2, "as the base model's do"),
    "wrong": (2, "its log-probabilities on the probe differ"),
    "partial": (1, "another set of modules (11) than the trainer adapts (21)"),
    "misnamed": (1, "it cannot load it"),
}
STEPS = 10


class Run:
    """The services, a trainer and a good node, and bad ones beside it."""

    def __init__(self, shell: Shell, *changes: str) -> None:
        self.path = shell.folder / "run"
        self._common = [str(shell.config), "--out", str(self.path)]
        for change in (
            "run.eval_every=0",
            f"run.steps={STEPS}",
            "inference.slots=16",
            "buffer.max_staleness=2",
            *changes,
        ):
            self._common += ["--set", change]
        self._shell = shell
        self._bad: list[subprocess.Popen[bytes]] = []
        shell.start("buffer", *self._common)
        real_runs.wait_for((self.path / "run.json").exists, 60, "the run directory")

    def good(self) -> None:
        self._shell.start("infer", *self._common, "--name", "good")

    def bad(self, fault: str, from_policy: int | str) -> None:
        """Started as `async-rl infer` starts a node, with the wrapper in its place."""
        wrapper = [sys.executable, "-P", str(HERE / "wrong_adapter_node.py")]
        run = ["--config", str(self.path / "config.toml"), "--dir", str(self.path), "--name", fault]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "WRONG_ADAPTER": f"{fault} {from_policy}"}
        self._bad.append(subprocess.Popen([*wrapper, *run], env=os.environ | environment, stderr=subprocess.DEVNULL))

    def train(self, timeout: float, *nodes: str) -> tuple[int, str]:
        """Once these nodes are here, so that none comes too late to be found out."""

        def are_here() -> bool:
            time.sleep(0.5)
            return {node.name for node in state_of(str(self.path)).nodes} == set(nodes)

        real_runs.wait_for(are_here, 150, f"nodes {nodes}")
        trainer = self._shell.start("train", *self._common)
        output, _ = trainer.communicate(timeout=timeout)
        return trainer.returncode, output

    def pools(self) -> list[dict[str, Any]]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [record["pools"] for record in map(json.loads, lines) if "pools" in record]

    def tokens_of(self, node: str) -> set[int]:
        """The versions of a node's trained tokens, as far as trajectories are kept: the first of every group."""
        lines = map(json.loads, (self.path / "samples.jsonl").read_text().splitlines())
        return {
            version
            for line in lines
            if line["node"] == node
            for segment in line["segments"]
            for version in segment["versions"]
            if version is not None
        }

    def close(self) -> None:
        for process in self._bad:
            process.terminate()
        for process in self._bad:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def check(run: Run, faults: list[str]) -> None:
    """Every bad node was named, with the policy it was found out by and the cause, and taught the trainer nothing under
    it; the good one did all the rest, and every attempt is accounted for."""
    last = run.pools()[-1]
    nodes = {node["name"]: node for node in last["nodes"]}
    measured = [each for pools in run.pools() for each in pools["mismatches"]]
    assert nodes["good"]["state"] == "ready"
    for fault in faults:
        from_policy, words = FAULTS[fault]
        assert nodes[fault]["state"] == "quarantined"
        assert words in nodes[fault]["reason"]
        # By the first policy that it got wrong: it was judged before it worked under that, so within a step.
        found = int(nodes[fault]["reason"].removeprefix("main ").partition("-")[0])
        shown = [version for name, version, _, _ in measured if name == fault and version >= from_policy]
        assert found == min(shown, default=found) >= from_policy
        assert max(run.tokens_of(fault), default=-1) < from_policy
    assert (last["quarantined"], last["returned"]) == (len(faults), 0)
    good = [(version, far) for name, version, far, _ in measured if name == "good"]
    assert [version for version, _ in good[:2]] == [0, 0]  # the canary, and the first policy
    assert len(good) >= 4
    assert max(far for _, far in good) < 1e-3
    summary = real_runs.summary(run.path)
    ledger = summary["ledger"]
    assert summary["steps"] == STEPS
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    trained_by = [set(record["nodes"]) for record in real_runs.records(run.path)]
    assert {"good"} in trained_by


@pytest.mark.e2e
def test_one_of_two_nodes_serves_an_adapter_at_the_wrong_scale(shell: Shell) -> None:
    run = Run(shell)
    try:
        run.good()
        run.bad("scaled", FAULTS["scaled"][0])
        code, output = run.train(120, "good", "scaled")
        assert code == 0, output
        check(run, ["scaled"])
    finally:
        run.close()


@pytest.mark.faults
@pytest.mark.parametrize("faults", [["empty", "wrong"], ["partial", "misnamed"]], ids=" ".join)
def test_nodes_with_other_faults_are_each_told_apart(shell: Shell, faults: list[str]) -> None:
    run = Run(shell)
    try:
        run.good()
        for fault in faults:
            run.bad(fault, FAULTS[fault][0])
        code, output = run.train(150, "good", *faults)
        assert code == 0, output
        check(run, faults)
    finally:
        run.close()


@pytest.mark.faults
def test_a_run_whose_only_node_fails_its_canary_ends_and_says_so(shell: Shell) -> None:
    run = Run(shell, "buffer.quarantine_limit=2")
    try:
        run.bad("empty", "canary")
        code, output = run.train(120, "empty")
        assert code != 0
        assert "every node has been quarantined for 2 s: empty: canary 0-" in output
        assert "as the base model's do" in output
    finally:
        run.close()

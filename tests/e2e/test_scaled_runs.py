"""`async-rl scale` on a run with real processes: up, down, and the run's books."""

from __future__ import annotations

import pytest
import real_runs

from async_rl.run.directory import RunDirectory
from async_rl.run.summary import ledger_balances, nested_ledger
from async_rl.run.view import Address, fetch_status

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(750)]

SETTINGS = [
    "--set", "run.steps=100000", "--set", "run.eval_every=0", "--set", "trainer.checkpoint_every=0",
    "--set", "inference.nodes=1", "--set", "inference.slots=8", "--set", "inference.max_tokens_per_second=300",
    "--set", "launch.grace=3",
]  # fmt: skip


@pytest.mark.sample
def test_a_run_is_made_larger_and_smaller_while_it_goes_on_and_its_ledger_balances(shell):
    run = shell.folder / "scaled"
    launcher = shell.start("run", str(shell.config), "--out", str(run), *SETTINGS)
    real_runs.wait_for((run / "requests").is_dir, 60, "the launcher")

    code, output = shell.run("scale", "inference=3", str(run), "--timeout", "150", timeout=500)
    assert code == 0, output
    assert output.splitlines()[0] == "started: node-1, node-2"
    assert "3 nodes, 1 before" in output
    code, output = shell.run("scale", "inference=1", str(run), timeout=300)
    assert code == 0, output
    assert output.splitlines()[0] == "told to leave: node-2, node-1"
    code, output = shell.run("scale", "inference=0", str(run))
    assert code == 1
    assert "at least 1" in output

    tool = Address.of(RunDirectory.open(run)).client("looker-on")
    tool.connect(30)
    status = fetch_status(tool, 30)
    tool.close()
    assert [node.name for node in status.nodes] == ["node-0"]
    ledger = nested_ledger(status.ledger)
    assert ledger_balances(ledger)
    assert ledger["dropped"]["node_lost"] == 0
    before = len(real_runs.records(run))
    real_runs.wait_for(lambda: len(real_runs.records(run)) >= before + 2, 60, "two more steps")
    real_runs.interrupt(launcher)
    output, _ = launcher.communicate(timeout=220)
    assert launcher.returncode == 130, output
    assert not (run / "requests").exists()
    assert "failed" not in (run / "logs" / "launcher.log").read_text()
    assert real_runs.processes_of(run) == []

    code, output = shell.run("scale", "inference=2", str(run))
    assert code == 1
    assert "not going on" in output


@pytest.mark.scale
def test_a_trainer_that_waits_for_busy_nodes_gets_more_of_them_by_itself(shell):
    run = shell.folder / "autoscaled"
    launcher = shell.start(
        "run", str(shell.config), "--out", str(run), *SETTINGS, "--set", "inference.max_tokens_per_second=60",
        "--set", "launch.autoscale.max_nodes=2", "--set", "launch.autoscale.cool_down=10",
        "--set", "launch.autoscale.every=5",
    )  # fmt: skip
    log = run / "logs" / "launcher.log"
    real_runs.wait_for(lambda: log.exists() and "autoscale:" in log.read_text(), 200, "a second node")
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("autoscale:")]
    print(line)
    assert line.startswith("autoscale: 1 → 2 nodes, node-1 started: the trainer waited ")
    code, output = shell.run("scale", "inference=3", str(run))
    assert code == 1
    assert "[launch.autoscale] 1 to 2 nodes" in output
    real_runs.interrupt(launcher)
    output, _ = launcher.communicate(timeout=220)
    assert launcher.returncode == 130, output
    assert real_runs.processes_of(run) == []

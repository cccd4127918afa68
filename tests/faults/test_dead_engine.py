"""A node whose engine dies hands over what it has begun, and is started again; the run goes on meanwhile."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import Shell, summary

from async_rl.config import load_config
from async_rl.inference_config import node_groups
from async_rl.run.directory import RunDirectory
from async_rl.run.local import with_model
from async_rl.run.plans import plan_run
from async_rl.run.pools import Pools
from async_rl.run.process import EXIT_AGAIN

pytestmark = [pytest.mark.sample, pytest.mark.timeout(600)]

HERE = Path(__file__).resolve()
SETTINGS = [
    "run.steps=24", "run.eval_every=0", "inference.max_tokens_per_second=120", "launch.grace=5", "buffer.heartbeat=2",
]  # fmt: skip


def test_a_node_whose_engine_died_loses_nothing_and_comes_back(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[2]}:{HERE.parents[1] / 'support'}")
    monkeypatch.setenv("DIES", f"20 {tmp_path / 'died'}")
    config = load_config(str(shell.config), SETTINGS)
    directory = RunDirectory.create(tmp_path / "run", config)
    try:
        with directory.hold():
            config = with_model(config, directory)
            specs = plan_run(node_groups(config.inference), directory.write_config(config), directory)
            specs = [replace(spec, module="dying_engine_node") if spec.name == "node-0" else spec for spec in specs]
            with Pools(specs, directory.logs, config.launch.grace, restarts=1) as pools:
                outcome = pools.supervise()
    finally:
        directory.remove_sockets()
    assert (outcome.code, outcome.lost, outcome.message(5)) == (0, (), "")
    ended = [(each.name, each.code, each.last_line) for each in outcome.restarted]
    assert ended == [("node-0", EXIT_AGAIN, "the server ended with exit code 9; its log: /some/server.log")]
    log = (directory.logs / "node-0.log").read_text()
    (attempts,) = re.findall(r"left: (\d+) attempts with \d+ tokens handed over, \d+ given back", log)
    assert int(attempts) > 0
    (sampled,) = re.findall(r"sampled (\d+) tokens", log)
    assert int(sampled) > 0, "it works again"
    ledger = summary(directory.path)["ledger"]
    assert ledger["trained"] == 24 * 4 * 8
    assert ledger["issued"] == sum(ledger[key] for key in ("leased", "ready", "batched", "trained")) + sum(
        ledger["dropped"].values()
    )
    dropped = {reason for reason, count in ledger["dropped"].items() if count}
    assert dropped <= {"cancelled"}, "what had not begun was given back, the rest handed over"

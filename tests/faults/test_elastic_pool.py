"""One run whose inference pool goes 2 -> 4 -> 1 -> 3 nodes while it trains: a node is killed, one is told to end by
SIGTERM with two seconds of grace, one by `async-rl drain`, and a name comes back.

Each node is capped far below what a core can do, and the trainer is faster than all of them together, so that what is
measured is whether the pool's work goes on, and not how busy this machine is.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
import real_runs

from async_rl.run.directory import RunDirectory
from async_rl.run.summary import ledger_balances, nested_ledger
from async_rl.run.view import Address, fetch_status
from async_rl.wire.messages import NodeStatus, Status

pytestmark = [pytest.mark.e2e]

BOUND, GROUPS, SIZE = 4, 4, 8
SETTINGS = [
    "--set", "run.steps=100000", "--set", "run.eval_every=0", "--set", "trainer.checkpoint_every=0",
    "--set", f"buffer.max_staleness={BOUND}", "--set", f"buffer.groups_per_step={GROUPS}",
    "--set", f"buffer.group_size={SIZE}", "--set", "inference.slots=8", "--set", "inference.max_tokens_per_second=200",
    "--set", "launch.grace=2",
]  # fmt: skip
SCALES = 0.85  # of n times what one node does


class ElasticRun:
    def __init__(self, shell: real_runs.Shell) -> None:
        self.shell = shell
        self.folder = shell.folder / "elastic"
        self.arguments = [str(shell.config), "--out", str(self.folder), *SETTINGS]
        self.buffer = shell.start("buffer", *self.arguments)
        real_runs.wait_for((self.folder / "run.json").exists, 60, "the run directory")
        directory = RunDirectory.open(self.folder)
        self.tool = Address(directory.endpoint, directory.run_id, directory.token, None).client("looker-on")
        self.tool.connect(30)
        self.nodes: dict[str, Popen[str]] = {}

    def status(self) -> Status:
        return fetch_status(self.tool, 30)

    def add(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = self.shell.start("infer", *self.arguments, "--name", name)
        self.await_nodes()

    def ready(self) -> dict[str, NodeStatus]:
        return {node.name: node for node in self.status().nodes if node.state == "ready" and node.sampled_tokens}

    def await_nodes(self) -> None:
        """Until exactly those take part that should, and all of them have sampled."""
        deadline = time.monotonic() + 200
        while self.ready().keys() != self.nodes.keys():
            assert time.monotonic() < deadline, (sorted(self.nodes), self.status())
            time.sleep(0.3)

    def rate(self, seconds: float) -> float:
        """Tokens a second of all nodes."""
        before, started = self.ready(), time.monotonic()
        time.sleep(seconds)
        after, ended = self.ready(), time.monotonic()
        assert before.keys() == after.keys() == self.nodes.keys()
        tokens = sum(after[name].sampled_tokens - before[name].sampled_tokens for name in after)
        return tokens / (ended - started)

    def kill(self, name: str) -> None:
        """kill -9 of the node: no handler, no goodbye; and of its launcher, stopped first, lest it start another."""
        launcher = psutil.Process(self.nodes.pop(name).pid)
        launcher.suspend()
        (node,) = [child for child in launcher.children(recursive=True) if "inference.node" in child.cmdline()]
        node.kill()
        launcher.kill()

    def told_to_end(self, name: str) -> float:
        """SIGTERM; the seconds from when the node read it until it had handed over, by its log. It ends well."""
        process = self.nodes.pop(name)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=220)
        assert process.returncode == 0, output
        told, left = (time_of(output, words) for words in ("leaving within", "left:"))
        return left - told

    def drained(self, name: str) -> None:
        """Within a second, which leaves no time to finish anything."""
        code, output = self.shell.run("drain", name, str(self.folder), "--grace", "1")
        assert code == 0, output
        output, _ = self.nodes[name].communicate(timeout=220)
        assert self.nodes.pop(name).returncode == 0, output

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def end(self, trainer: Popen[str]) -> None:
        """The trainer is interrupted: it tells everybody."""
        self.tool.close()
        trainer.send_signal(signal.SIGINT)
        for process in (trainer, self.buffer, *self.nodes.values()):
            output, _ = process.communicate(timeout=220)
            assert process.returncode == (130 if process is trainer else 0), output


def time_of(log: str, words: str) -> float:
    """Seconds of the day at which a log's line with these words was written."""
    line = next(line for line in log.splitlines() if words in line)
    hours, minutes, seconds = line.split()[1].replace(",", ".").split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)


def check_books(folder: Path, records: list[dict[str, Any]]) -> None:
    """No ticket lost, no token too old, and every attempt accounted for."""
    steps = [record for record in records if "step" in record]
    assert len(steps) >= 5
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert {step["trained"] for step in steps} == {GROUPS * SIZE}
    assert max(step["staleness_max"] for step in steps) <= BOUND
    ledgers = [nested_ledger(record["pools"]["ledger"]) for record in records if "pools" in record]
    assert all(ledger_balances(ledger) for ledger in ledgers)
    last = ledgers[-1]
    assert last["leased"] + last["ready"] + last["batched"] == 0
    assert last["trained"] == len(steps) * GROUPS * SIZE
    assert last["dropped"]["env_failed"] == last["dropped"]["refused"] == last["dropped"]["stale"] == 0
    assert real_runs.processes_of(folder) == []


@pytest.mark.faults
@pytest.mark.timeout(2250)
def test_a_pool_that_grows_and_shrinks_loses_nothing_and_its_work_scales_with_it(shell):
    run = ElasticRun(shell)
    trainer = shell.start("train", *run.arguments)
    rates: dict[int, float] = {}

    run.add("a", "b")
    rates[2] = run.rate(10)
    run.add("c", "d")
    rates[4] = run.rate(10)

    run.kill("c")
    assert run.told_to_end("d") < 2
    run.drained("b")
    run.await_nodes()
    status = run.status()
    assert status.handovers["handed_over"] > 0
    assert 0 < status.ledger["dropped.node_lost"] <= 24  # what c had: its slots, a lookahead, a group more
    rates[1] = run.rate(10)

    run.add("d", "e")  # d has been here before
    rates[3] = run.rate(10)
    print("tokens a second by nodes:", rates)
    run.end(trainer)
    check_books(run.folder, run.records())
    for count, rate in rates.items():
        assert rate >= SCALES * count * rates[1], rates


@pytest.mark.timeout(600)
def test_a_run_outlives_nodes_that_end_and_one_of_the_same_name_joins_again(shell):
    """The short one: 1 -> 2 -> 1 -> 2 nodes, and the run's books."""
    run = ElasticRun(shell)
    trainer = shell.start("train", *run.arguments)
    run.add("a", "b")
    run.told_to_end("a")
    run.await_nodes()
    run.add("a")
    run.kill("b")
    run.await_nodes()
    before = len([record for record in run.records() if "step" in record])
    real_runs.wait_for(lambda: len([r for r in run.records() if "step" in r]) >= before + 5, 60, "five more steps")
    run.end(trainer)
    check_books(run.folder, run.records())

"""[launch] kind = "ray", on a cluster of raylets on this machine: the run of docs/ray.md, with one of them killed."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import real_runs

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

from async_rl.run.directory import RunDirectory
from async_rl.run.scratch import PREFIX, remove_leftovers
from async_rl.run.summary import ledger_balances
from async_rl.run.view import Address, fetch_status
from async_rl.wire.messages import NodeStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MEMORY = 80 << 20  # bytes of object store, Ray's least: nothing goes through it
BOUND, STEPS = 4, 80
REPLACED_S = 60.0
SETTINGS = [
    "--set", f"run.steps={STEPS}", "--set", f"run.eval_every={STEPS}", "--set", "run.eval_samples=256",
    "--set", "buffer.groups_per_step=16", "--set", f"buffer.max_staleness={BOUND}", "--set", "inference.slots=64",
    "--set", "inference.nodes=2", "--set", "inference.max_tokens_per_second=350",
    "--set", "trainer.checkpoint_every=50",
    "--set", "launch.kind=ray", "--set", "launch.ray.inference.num_cpus=0",
    "--set", "launch.ray.inference.resources={rollout=1}", "--set", "launch.grace=5",
]  # fmt: skip


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where everything that this test starts puts its temporary files, but for Ray's own."""
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))  # short, for sockets
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(temporary: Path) -> Iterator[Cluster]:
    """A head for buffer, store and trainer, and two raylets with room for a node each."""
    made = Cluster(initialize_head=True, head_node_args=raylet(num_cpus=2, include_dashboard=False))
    try:
        for _ in range(2):
            made.add_node(**raylet(num_cpus=0, resources={"rollout": 1}))
        yield made
    finally:
        made.shutdown()


def raylet(**settings: Any) -> dict[str, Any]:
    return {"object_store_memory": MEMORY, **settings}


class Watched:
    """A run's buffer, as its status shows it."""

    def __init__(self, run: Path) -> None:
        real_runs.wait_for((run / "requests").is_dir, 200, "the launcher")
        self.directory = RunDirectory.open(run)
        self.tool = Address.of(self.directory).client("looker-on")
        self.tool.connect(200)

    def working(self) -> dict[str, NodeStatus]:
        nodes = fetch_status(self.tool, 60).nodes
        return {node.name: node for node in nodes if node.state == "ready" and node.sampled_tokens}

    def await_nodes(self, *names: str, timeout_s: float = 300) -> float:
        """Seconds until exactly these are at work."""
        started = time.monotonic()
        wait_for(lambda: set(self.working()) == set(names), timeout_s, lambda: f"{names}, there are {self.working()}")
        return time.monotonic() - started


def wait_for(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what()}"
        time.sleep(0.3)


def raylet_of(cluster: Cluster, run: Path, node: str) -> Any:
    """Where a node of the run is, by the launcher's log."""
    lines = (run / "logs" / "launcher.log").read_text().splitlines()
    line = next(line for line in reversed(lines) if line.startswith(f"{node} runs on"))
    short = line.rpartition("Ray node ")[2].rstrip(")")
    return next(each for each in cluster.worker_nodes if each.node_id.startswith(short))


def left_behind(run: Path, temporary: Path) -> list[str]:
    """Processes of the run, the private folders of its actors, and that of its sockets."""
    folders = [str(path) for pattern in (f"{PREFIX}*", "arl-*") for path in temporary.glob(pattern)]
    ours = [
        str(process.info["pid"])
        for process in psutil.process_iter(["pid", "cmdline"])
        if any(part.startswith((str(run), str(temporary / PREFIX))) for part in process.info["cmdline"] or ())
    ]
    return [*ours, *folders]


@pytest.mark.scale
def test_a_run_on_ray_outlives_a_raylet_is_scaled_and_leaves_nothing(temporary, cluster, shell):
    run = shell.folder / "on-ray"
    launcher = shell.start(
        "run", str(shell.config), "--out", str(run), *SETTINGS, "--set", f"launch.ray.address={cluster.address}"
    )
    watched = Watched(run)
    print(f"both nodes at work after {watched.await_nodes('node-0', 'node-1'):.1f} s")
    real_runs.wait_for(lambda: len(real_runs.records(run)) >= 3, 120, "three steps")

    lost = raylet_of(cluster, run, "node-1")
    killed = time.monotonic()
    cluster.remove_node(lost, allow_graceful=False)
    real_runs.wait_for(lambda: set(watched.working()) == {"node-0"}, 120, "the loss to be seen")
    print(f"loss seen by the buffer after {time.monotonic() - killed:.1f} s")
    cluster.add_node(**raylet(num_cpus=0, resources={"rollout": 2}))
    watched.await_nodes("node-0", "node-1")
    replaced = time.monotonic() - killed
    print(f"replaced and sampling after {replaced:.1f} s")

    code, output = shell.run("scale", "inference=3", str(run), timeout=400)
    assert code == 0, output
    assert output.startswith("started: node-2")
    print(output)
    watched.await_nodes("node-0", "node-1", "node-2")
    code, output = shell.run("scale", "inference=2", str(run), timeout=400)
    assert code == 0, output
    assert output.startswith("told to leave: node-2")
    print(output)
    watched.tool.close()

    output, _ = launcher.communicate(timeout=500)
    assert launcher.returncode == 0, output
    print(output)
    assert "was lost with its machine" in output
    assert replaced <= REPLACED_S
    check_books(run)
    wait_for(lambda: not left_behind(run, temporary), 15, lambda: f"nothing to be left: {left_behind(run, temporary)}")


@pytest.mark.long
@pytest.mark.scale
def test_a_launcher_that_is_killed_leaves_neither_processes_nor_its_cluster(temporary, shell):
    """And with keys the nodes, which get theirs from the launcher, reach the buffer at this machine's address."""
    run, keys = shell.folder / "killed", shell.folder / "keys"
    code, output = shell.run("keys", str(keys))
    assert code == 0, output
    launcher = shell.start(
        "run", str(shell.config), "--out", str(run), "--set", "run.steps=100000", "--set", "inference.nodes=1",
        "--set", "launch.kind=ray", "--set", f"buffer.keys={keys}",
        "--set", "buffer.endpoint=tcp://*:*", "--set", "buffer.store_endpoint=tcp://*:*",
    )  # fmt: skip
    watched = Watched(run)
    watched.await_nodes("node-0")
    watched.tool.close()
    assert not watched.directory.endpoint.startswith(("tcp://*", "tcp://127."))
    ours = psutil.Process(launcher.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in ours)
    assert len([process for process in ours if str(run) in process.cmdline()]) >= 3  # store, buffer, trainer
    agents = [process for process in ours if process.name().endswith("Agent")]  # Ray's own, which ask for its head
    launcher.kill()
    killed = time.monotonic()
    _, alive = psutil.wait_procs([process for process in ours if process not in agents], timeout=60)
    assert alive == []
    print(f"all of the run and Ray's head gone after {time.monotonic() - killed:.1f} s")
    _, alive = psutil.wait_procs(agents, timeout=180)
    assert alive == []
    print(f"and its agents after {time.monotonic() - killed:.1f} s")
    remove_leftovers(temporary)  # as the next process that makes such a folder does: Ray kills its workers' children
    assert left_behind(run, temporary) == []


@pytest.mark.faults
def test_ranks_are_placed_one_by_one_and_all_start_again_when_one_is_killed(shell):
    run = shell.folder / "ranks"
    launcher = shell.start(
        "run", str(shell.config), "--out", str(run), "--set", "run.steps=5", "--set", "run.eval_every=0",
        "--set", "inference.nodes=1", "--set", "buffer.shards=2", "--set", "inference.relay=true",
        "--set", "trainer.checkpoint_every=1", "--set", "trainer.parallel.data=2",
        "--set", "launch.kind=ray", "--set", "launch.ray.spread_ranks=true",
    )  # fmt: skip
    real_runs.wait_for(lambda: (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= 1, 300, "a step")
    (rank,) = [each for each in real_runs.processes_of(run) if "trainer-rank1" in each.cmdline()]
    assert rank.environ()["WORLD_SIZE"] == "2"
    rank.kill()
    output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    assert "trainer-rank1 was killed by SIGKILL" in output
    said = (run / "logs" / "launcher.log").read_text()
    assert "all 2 ranks are started again" in said
    assert said.count("trainer-rank1 runs on") == said.count("\ntrainer runs on") == 2
    assert "buffer-1 runs on" in said
    assert "node-0 relays to others" in (run / "logs" / "store.log").read_text()
    summary = real_runs.summary(run)
    assert summary["steps"] == 5
    assert ledger_balances(summary["ledger"])
    assert [record["step"] for record in real_runs.records(run)] == list(range(5))
    assert real_runs.processes_of(run) == []


@pytest.mark.faults
def test_a_raylet_that_takes_buffer_store_and_trainer_along_costs_the_steps_since_the_checkpoint(temporary, shell):
    made = Cluster(initialize_head=True, head_node_args=raylet(num_cpus=1, include_dashboard=False))
    try:
        home = made.add_node(**raylet(num_cpus=0, resources={"home": 3}))
        run = shell.folder / "homeless"
        launcher = shell.start(
            "run", str(shell.config), "--out", str(run), "--set", "run.steps=10", "--set", "run.eval_every=0",
            "--set", "inference.nodes=1", "--set", "inference.max_tokens_per_second=300",
            "--set", "launch.kind=ray", "--set", f"launch.ray.address={made.address}",
            "--set", "launch.ray.services={num_cpus=0, resources={home=1}}",
            "--set", "launch.ray.trainer={num_cpus=0, resources={home=1}}",
        )  # fmt: skip
        real_runs.wait_for(
            lambda: (run / "metrics.jsonl").exists() and len(real_runs.records(run)) >= 3, 300, "three steps"
        )
        made.remove_node(home, allow_graceful=False)
        made.add_node(**raylet(num_cpus=0, resources={"home": 3}))
        output, _ = launcher.communicate(timeout=400)
    finally:
        made.shutdown()
    assert launcher.returncode == 0, output
    for name in ("buffer", "store", "trainer"):
        assert f"{name} was lost with its machine" in output
    summary = real_runs.summary(run)
    assert ledger_balances(summary["ledger"])
    assert summary["ledger"]["trained"] == 10 * 4 * 8
    assert [record["step"] for record in real_runs.records(run)] == list(range(10))
    assert not left_behind(run, temporary)


@pytest.mark.scale
@pytest.mark.long
def test_what_no_machine_has_room_for_is_said_and_ends_the_run(shell):
    run = shell.folder / "too-large"
    code, output = shell.run(
        "run", str(shell.config), "--out", str(run), "--set", "launch.kind=ray",
        "--set", "launch.ray.trainer.num_gpus=1", "--set", "launch.ray.placement_timeout=12", timeout=200,
    )  # fmt: skip
    assert code == 1, output
    assert "trainer failed (exit 1): no machine of the Ray cluster had room for it (1 GPU) within 12 s" in output
    said = (run / "logs" / "launcher.log").read_text()
    assert "trainer waits for a machine of the Ray cluster with room for it (1 GPU), 12 s at most" in said
    assert real_runs.processes_of(run) == []


def check_books(run: Path) -> None:
    """Reward rises, the bound is kept, and every attempt is accounted for."""
    summary = real_runs.summary(run)
    ledger = summary["ledger"]
    assert ledger_balances(ledger)
    assert ledger["leased"] + ledger["ready"] + ledger["batched"] == 0
    assert ledger["dropped"]["node_lost"] > 0
    assert ledger["trained"] == STEPS * 16 * 8
    assert summary["staleness"]["max"] <= BOUND
    rewards = [record["reward"] for record in real_runs.records(run)]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    print(f"reward {first:.3f} -> {last:.3f}; {json.dumps(ledger)}")
    assert last >= first + 0.08
    assert summary["eval"]["last"] > summary["eval"]["first"]
    for name in ("buffer", "store", "trainer", "node-0", "node-1", "node-2"):
        assert (run / "logs" / f"{name}.log").stat().st_size > 0

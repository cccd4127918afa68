"""A real buffer in a process of its own, and nodes and a trainer around it that do all but compute.

They are threads of the test, with real links; they remember what they delivered and trained, byte for byte."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.bundle import bundled, trajectories_of
from async_rl.config import Config, config_from_table
from async_rl.fingerprint import pacing
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import child_environment, last_line
from async_rl.trajectory import Packed, Segment, Trajectory, encode_trajectory, lay_out
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.keys import dial_keys
from async_rl.wire.link import Client, LinkClosed, LinkTimeout, Received
from async_rl.wire.messages import (
    Batch,
    Cancel,
    Confirm,
    Confirmed,
    Disposition,
    Draw,
    Final,
    Finish,
    Introduce,
    Leases,
    NodeReady,
    NodeServing,
    NodeWants,
    PolicyPublished,
    Results,
    Role,
    Status,
    StatusRequest,
    Stop,
    TrainerReady,
)
from async_rl.wire.payloads import pack_payloads, unpack_payloads

FINGERPRINT = {"test": "fake work"}
PATIENCE_S = 60.0
LOOK_S = 0.02
AHEAD = 64


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"{version:064x}")


class Service:
    """`buffer.service` or `buffer.store` in a process of its own; `config` as a table over small defaults."""

    def __init__(self, folder: Path, module: str = "buffer.service", **tables: dict[str, Any]) -> None:
        table: dict[str, Any] = {
            "run": {"name": "faults", "steps": 10},
            "model": {"path": "unused"},
            "task": {"kind": "digit_sort"},
            "inference": {"max_context": 64, "max_new_tokens": 32},
            "buffer": {
                "endpoint": "tcp://127.0.0.1:*", "store_endpoint": "tcp://127.0.0.1:*", "groups_per_step": 4,
                "group_size": 4, "max_staleness": 2, "heartbeat": 0.3,
            },
        }  # fmt: skip
        merged = {name: table.get(name, {}) | tables.get(name, {}) for name in table.keys() | tables.keys()}
        self.config: Config = config_from_table(merged, "fake work")
        self.directory = RunDirectory.create(folder / "run", self.config)
        self.log = folder / f"{module}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", module, "--config", str(self.directory.config_path),
                    "--dir", str(self.directory.path), "--name", module.partition(".")[2],
                ],
                env=child_environment(), stderr=log, stdout=log, start_new_session=True,
            )  # fmt: skip

    def dial(self, role: Role, name: str, endpoint: str = "", arrange: Callable[[Client], object] = id) -> Client:
        """A connected link; `arrange` may do something to it before it connects."""
        heartbeat_s = self.config.buffer.heartbeat
        keys = dial_keys(self.directory.keys, role)
        link = Client(
            endpoint or self.directory.endpoint, run=self.directory.run_id, token=self.directory.token, role=role,
            name=name, peer="the service", heartbeat_s=heartbeat_s, keys=keys,
        )  # fmt: skip
        arrange(link)
        link.connect(PATIENCE_S)
        return link

    def status(self, tool: Client) -> Status:
        tool.send(StatusRequest())
        status: Status = receive(tool, Status).message
        return status

    @property
    def last_line(self) -> str:
        return last_line(self.log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def receive(link: Client, kind: type) -> Received:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        received = link.receive(max(0.0, deadline - time.monotonic()), kind.__name__)
        if isinstance(received.message, kind):
            return received


def packed_trajectory(lease: int, sample: int, serves: PolicyId, name: str, rng: random.Random, tokens: int) -> Packed:
    """As a node packs them, every one different."""
    ids = np.array([rng.randrange(1000) for _ in range(tokens)], np.int32)
    mask = np.zeros(tokens, np.uint8)
    mask[: tokens // 4] = 1
    logprobs = np.where(mask == 0, -rng.random(), 0.0).astype(np.float32)
    run = VersionRun(serves.version, serves.digest, int((mask == 0).sum()))
    headers, pieces = lay_out([Segment(ids, logprobs, mask, (run,), "stop")])
    made = Trajectory(lease, sample, "ok", rng.random(), headers, memoryview(b""), node=name, engine="test")
    return Packed(made, pieces)


class Published:
    """What the trainer has published last; -1: nothing."""

    version = -1


class Worker(threading.Thread):
    """A thread with a link, whose error is kept for the test."""

    def __init__(self, link: Client, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.link = link
        self.error: BaseException | None = None
        self.ending = False

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def work(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.ending = True
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"{self.name} did not end"
        self.link.close(0.5)


class FakeNode(Worker):
    """Answers every sample of every lease; `delivered` has the bytes by (lease, sample). `length` gives a
    trajectory's tokens. While `paused` it says and reads nothing, though its link lives; while it
    `withholds` it takes leases, and delivers nothing."""

    def __init__(
        self, link: Client, name: str, published: Published, seed: int, length: Callable[[random.Random], int]
    ) -> None:
        super().__init__(link, name)
        self.delivered: dict[tuple[int, int], bytes] = {}
        self.introductions = 0
        self.paused = self.withholds = False
        self.stopped: Stop | None = None
        self._published = published
        self._serves = -1
        self._random = random.Random(seed)
        self._length = length
        self._wanted = 0
        self._owed: list[tuple[int, int]] = []

    def work(self) -> None:
        sessions = self.link.sessions
        self._introduce()
        while not self.ending and self.stopped is None:
            if self.paused:
                time.sleep(LOOK_S)
                continue
            if self.link.sessions > sessions:
                sessions = self.link.sessions
                self._introduce()
            if self._published.version > self._serves:
                self._serves = self._published.version
                self.link.send(NodeServing(policy(self._serves), 0, 0.0))
            if len(self.delivered) + AHEAD // 2 >= self._wanted:
                self._wanted = len(self.delivered) + AHEAD
                self.link.send(NodeWants(self._wanted))
            with contextlib.suppress(LinkTimeout):
                self._take(self.link.receive(LOOK_S, "a lease").message)
            self._deliver()

    def _introduce(self) -> None:
        self.introductions += 1
        self._owed.clear()
        self._wanted = len(self.delivered)
        self._serves = -1
        self.link.send(NodeReady("test", AHEAD, FINGERPRINT))

    def _take(self, message: object) -> None:
        match message:
            case Leases(leases):
                self._owed += [(lease.lease, sample) for lease in leases for sample in lease.samples]
            case Cancel(leases, _):
                self._owed = [key for key in self._owed if key[0] not in leases]
            case Introduce():
                self._introduce()
            case Stop():
                self.stopped = message

    def _deliver(self) -> None:
        if not self._owed or self.withholds:
            return
        made = {
            key: packed_trajectory(*key, policy(self._serves), self.name, self._random, self._length(self._random))
            for key in self._owed
        }
        self._owed.clear()
        inline, blobs = pack_payloads(bundled(list(made.values())))
        self.link.send(Results(inline), blobs)
        self.delivered |= {key: packed.joined() for key, packed in made.items()}


class FakeTrainer(Worker):
    """Trains to the last step; `trained` has the bytes by (lease, sample), in the order of the batches. `pause_s` is
    what a step takes."""

    def __init__(self, link: Client, config: Config, published: Published, pause_s: float = 0.0) -> None:
        super().__init__(link, "trainer")
        self.trained: list[tuple[tuple[int, int], bytes]] = []
        self.steps_done = 0
        self.step_seconds: list[float] = []
        self.final: Status | None = None
        self._config = config
        self._published = published
        self._pause_s = pause_s

    def work(self) -> None:
        self.link.send(TrainerReady(FINGERPRINT, pacing(self._config)))
        self._publish(0)
        for step in range(self._config.run.steps):
            if self.ending:
                return
            started = time.monotonic()
            self.link.send(Draw(step))
            received = receive(self.link, Batch)
            dispositions = []
            for payload in unpack_payloads(received.message.trajectories, received.blobs):
                for head in trajectories_of(payload):
                    self.trained.append(((head.lease, head.sample), encode_trajectory(head)))
                    dispositions.append(Disposition(head.lease, (head.sample,), "trained"))
            time.sleep(self._pause_s)
            self.link.send(Confirm(received.message.batch, tuple(dispositions)))
            receive(self.link, Confirmed)
            self._publish(step + 1)
            self.steps_done = step + 1
            self.step_seconds.append(time.monotonic() - started)
        self.link.send(Finish("all steps are done"))
        self.final = receive(self.link, Final).message.status

    def _publish(self, version: int) -> None:
        self.link.send(PolicyPublished(policy(version)))
        self.link.flush(PATIENCE_S)
        self._published.version = version


def node_main(path: str, endpoint: str, name: str, heartbeat_s: float, version: Any) -> None:
    """A node in a process of its own, which can be stopped: the body of a spawned one. `version` is a shared value."""
    directory = RunDirectory.open(Path(path))
    link = Client(
        endpoint, run=directory.run_id, token=directory.token, role="node", name=name, peer="the service",
        heartbeat_s=heartbeat_s,
    )  # fmt: skip
    link.connect(PATIENCE_S)
    published = Published()

    def follow() -> None:
        while True:
            published.version = version.value
            time.sleep(LOOK_S)

    threading.Thread(target=follow, daemon=True).start()
    FakeNode(link, name, published, 7, lambda rng: 16).work()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"waited {timeout_s} s for {what}"
        time.sleep(LOOK_S)
    return time.monotonic() - started


def finish(trainer: FakeTrainer, *nodes: FakeNode, timeout_s: float = PATIENCE_S) -> None:
    """Wait until the trainer is done, and end the nodes; what went wrong anywhere is raised here."""
    trainer.join(timeout_s)
    if trainer.error is not None:
        raise trainer.error
    assert not trainer.is_alive(), f"the trainer has made {trainer.steps_done} steps in {timeout_s} s"
    for node in nodes:
        node.end()
        if node.error is not None and not isinstance(node.error, LinkClosed):  # the service says goodbye at the end
            raise node.error
    trainer.link.close(0.5)

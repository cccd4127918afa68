"""A real buffer service in a thread, and clients that speak to it as nodes, trainer and tools would."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from async_rl.bundle import trajectories_of
from async_rl.config import Config, config_from_table
from async_rl.fingerprint import pacing
from async_rl.run.exporter import Exporter
from async_rl.run.process import StopEvent
from async_rl.run.watchdog import Watchdog
from async_rl.trajectory import (
    Segment,
    Trajectory,
    encode_trajectory,
    pack_segments,
)
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import (
    Batch,
    Confirm,
    Confirmed,
    Disposition,
    Lease,
    Leases,
    NodeReady,
    NodeServing,
    NodeWants,
    PolicyPublished,
    Results,
    TrainerReady,
)
from buffer.recorder import Recorder
from buffer.rules import rules_from_config
from buffer.service import Service

RUN, TOKEN, HEARTBEAT = "r1", "t" * 64, 0.1
# The server takes a client for lost after three of the longer heartbeat of the two: whose thread gets no turn for some
# seconds is not to be given up. A test that means silence sets `silence_s` of the peer.
CLIENT_HEARTBEAT = 10.0
FINGERPRINT = {"model config": "aaaa", "sampling": "temperature 1.0"}
V0 = PolicyId("main", 0, "0" * 64)
V1 = PolicyId("main", 1, "1" * 64)
PATIENCE_S = 60.0


class Context(NamedTuple):
    """What Service needs of a PoolContext."""

    config: Config
    stopping: StopEvent
    exporter: Exporter
    watchdog: Watchdog
    together: bool = False
    shard: int = 0


class House:
    """A service in a thread, and clients that speak to it."""

    def __init__(self, folder: Path, max_context: int = 512, **buffer: Any) -> None:
        table = {
            "run": {"steps": 2},
            "model": {"path": "unused"},
            "task": {"kind": "digit_sort"},
            "inference": {"max_context": max_context},
            "buffer": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1, "heartbeat": HEARTBEAT} | buffer,
        }
        self.endpoint = f"ipc://{folder / 'b'}"
        self.stopping = StopEvent()
        self.exporter = Exporter()
        self.watchdog = Watchdog()
        server = Server(self.endpoint, run=RUN, token=TOKEN, name="buffer", heartbeat_s=HEARTBEAT)
        self.config = config_from_table(table, "test")
        self.recorder = Recorder(folder / "journal", RUN, rules_from_config(self.config), "never")
        self.service = Service(Context(self.config, self.stopping, Exporter(), self.watchdog), server, self.recorder)
        self.failure: BaseException | None = None
        self._server = server
        self._clients: list[Client] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.service.serve()
        except BaseException as error:
            self.failure = error
        finally:
            self.recorder.close()
            self._server.close()

    def client(self, role: Any, name: str, heartbeat_s: float = CLIENT_HEARTBEAT) -> Client:
        client = Client(
            self.endpoint, run=RUN, token=TOKEN, role=role, name=name, peer="buffer", heartbeat_s=heartbeat_s
        )  # fmt: skip
        client.connect(PATIENCE_S)
        self._clients.append(client)
        return client

    def trainer(self) -> Client:
        trainer = self.client("trainer", "trainer")
        trainer.send(TrainerReady(FINGERPRINT, pacing(self.config)))
        trainer.send(PolicyPublished(V0))
        trainer.flush(PATIENCE_S)
        return trainer

    def node(self, name: str = "node", wants: int = 4, fingerprint: dict[str, str] = FINGERPRINT) -> Client:
        node = self.client("node", name)
        node.send(NodeReady("torch", 8, fingerprint))
        node.send(NodeServing(V0, 3, 1.0))
        node.send(NodeWants(wants))
        return node

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the service did not end"

    def close(self) -> None:
        self.stopping.set()
        for client in self._clients:
            client.close(0.2)
        self._thread.join(PATIENCE_S)


def receive(client: Client, kind: type) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        received = client.receive(max(0.0, deadline - time.monotonic()), kind.__name__)
        if isinstance(received.message, kind):
            return received


def take_leases(node: Client, samples: int) -> list[Lease]:
    leases: list[Lease] = []
    while sum(len(lease.samples) for lease in leases) < samples:
        leases += receive(node, Leases).message.leases
    return leases


def answer(lease: Lease, sample: int, policy: PolicyId, n_tokens: int = 5, reward: float = 1.0) -> Trajectory:
    mask = (np.arange(n_tokens) < 2).astype(np.uint8)
    segment = Segment(
        np.arange(n_tokens, dtype=np.int32), np.full(n_tokens, -0.5, np.float32) * (mask == 0), mask,
        (VersionRun(policy.version, policy.digest, n_tokens - 2),), "stop",
    )  # fmt: skip
    headers, arrays = pack_segments([segment])
    return Trajectory(lease.lease, sample, "ok", reward, headers, arrays, node="node")


def deliver(node: Client, leases: list[Lease], policy: PolicyId = V0) -> None:
    results = [encode_trajectory(answer(lease, sample, policy)) for lease in leases for sample in lease.samples]
    node.send(Results(tuple(msgspec.Raw(data) for data in results)))


def confirm(trainer: Client, batch: Batch, policy: PolicyId) -> Confirmed:
    heads = [head for raw in batch.trajectories for head in trajectories_of(raw)]
    trainer.send(Confirm(batch.batch, tuple(Disposition(head.lease, (head.sample,), "trained") for head in heads)))
    confirmed: Confirmed = receive(trainer, Confirmed).message
    trainer.send(PolicyPublished(policy))
    return confirmed

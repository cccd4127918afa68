"""Gathers what the displays show: the metrics file as it grows, and the buffer's status once a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.display import Snapshot
from async_rl.run.metrics import MetricsTail, Record, eval_sets_of, steps_of
from async_rl.shards import whole_status
from async_rl.wire.keys import dial_keys
from async_rl.wire.link import Client
from async_rl.wire.messages import Status, StatusRequest
from async_rl.wire.security import reachable

STATUS_EVERY = 1.0
STATUS_TIMEOUT = 5.0
RATE_WINDOW = 10  # statuses over which the rollout rate is taken


def fetch_whole_status(clients: Sequence[Client], timeout: float = STATUS_TIMEOUT) -> Status:
    """Of all shards of a buffer, as one. Raises an AsyncRLError when one does not answer in time."""
    return whole_status([fetch_status(client, timeout) for client in clients])


def fetch_status(client: Client, timeout: float = STATUS_TIMEOUT) -> Status:
    """Ask a connected client's buffer for its status. Raises an AsyncRLError when no answer comes in time."""
    client.send(StatusRequest())
    deadline = time.monotonic() + timeout
    while True:
        received = client.receive(max(0.0, deadline - time.monotonic()), "the buffer's status")
        if isinstance(received.message, Status):
            return received.message


class Address(NamedTuple):
    """Where a run's buffer listens, and what it asks of a tool; `keys` is a folder of CURVE keys, `more` are the
    buffer's other shards."""

    endpoint: str
    run: str
    token: str
    keys: Path | None
    more: tuple[str, ...] = ()

    @classmethod
    def of(cls, directory: RunDirectory) -> Address:
        first, *more = map(reachable, directory.endpoints)
        return cls(first, directory.run_id, directory.token, directory.keys, tuple(more))

    @classmethod
    def of_store(cls, directory: RunDirectory) -> Address:
        """The policy store's, which tells about itself what a buffer does not know."""
        return cls.of(directory)._replace(endpoint=reachable(directory.store_endpoint), more=())

    def client(self, name: str, peer: str = "the buffer") -> Client:
        """Of the first shard, which knows all nodes. Raises KeyFileError."""
        return self._client(self.endpoint, name, peer)

    def clients(self, name: str) -> list[Client]:
        """One for each shard. Raises KeyFileError."""
        return [self._client(endpoint, name, "the buffer") for endpoint in (self.endpoint, *self.more)]

    def _client(self, endpoint: str, name: str, peer: str) -> Client:
        return Client(
            endpoint, run=self.run, token=self.token, role="tool", name=name, peer=peer,
            keys=dial_keys(self.keys, "tool"),
        )  # fmt: skip


class StatusFeed:
    """A thread that keeps the newest status. The link may be down (before the buffer listens, after it ended):
    then `latest` stays what it was, and it dials again."""

    def __init__(self, directory: RunDirectory, name: str = "launcher") -> None:
        self.latest: Status | None = None
        self.history: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._directory = directory
        self._name = name
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="status-feed", daemon=True)
        self._thread.start()

    @property
    def rollout_rate(self) -> float | None:
        """Sampled tokens a second over the last statuses."""
        seen = list(self.history)
        if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
            return None
        # A node that is gone takes its count with it; the rate is not negative for that.
        return max(0.0, (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]))

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(STATUS_TIMEOUT + STATUS_EVERY)

    def _follow(self) -> None:
        while not self._stopping.wait(STATUS_EVERY / 2):
            try:
                clients = Address.of(self._directory).clients(self._name)
            except AsyncRLError:
                continue
            try:
                for client in clients:
                    client.connect(STATUS_TIMEOUT)
                while not self._stopping.is_set():
                    status = fetch_whole_status(clients)
                    self.latest = status
                    self.history.append((status.uptime_s, sum(node.sampled_tokens for node in status.nodes)))
                    self._stopping.wait(STATUS_EVERY)
            except AsyncRLError:
                continue
            finally:
                for client in clients:
                    client.close()


class RunView:
    """The snapshots of one run."""

    def __init__(self, directory: RunDirectory, config: Config) -> None:
        self._config = config
        self._title = f"{config.run.name} · {directory.path}"
        self._tail = MetricsTail(directory.metrics_path)
        self._records: list[Record] = []
        self._steps: list[Record] = []
        self._evals: dict[str, list[Record]] = {}
        self._feed = StatusFeed(directory)
        self._start = time.monotonic()

    def snapshot(self) -> Snapshot:
        new = self._tail.read()
        if new:
            self._records += new
            self._steps, self._evals = steps_of(self._records), eval_sets_of(self._records)
        return Snapshot(
            title=self._title,
            total_steps=self._config.run.steps,
            bound=self._config.buffer.max_staleness,
            elapsed_s=time.monotonic() - self._start,
            steps=self._steps,
            evals=next(iter(self._evals.values()), []),
            more_evals=list(self._evals.values())[1:],
            status=self._feed.latest,
            rollout_rate=self._feed.rollout_rate,
        )

    def close(self) -> None:
        self._feed.close()

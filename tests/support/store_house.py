"""A policy store in a thread, behind a real socket: a trainer that uploads to it, and nodes that pull."""

from __future__ import annotations

import hashlib
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.run.exporter import Exporter
from async_rl.run.process import StopEvent
from async_rl.run.watchdog import Watchdog
from async_rl.version import PolicyId
from async_rl.wire.keys import NodeDoorKeys, ServiceKeys, dial_keys
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import FindSource, PinPolicy, Pull, Source, Stored, Upload
from buffer.policy_files import PolicyFiles
from buffer.relays import Relays
from buffer.store import StoreService
from inference.engine import PolicyContent
from inference.policies import PolicyFetched, PolicyFetchFailed, PolicyPuller
from inference.pulls import Relaying
from inference.relay import Relay

Read = Callable[[PolicyId, Path], PolicyContent]

RUN, TOKEN = "r1", "t" * 64
MAX_STALENESS = 1
PATIENCE_S = 60.0
RELAY_TIMEOUT_S = 3.0


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"{version:064x}")


def data_of(version: int, size: int = 1000) -> bytes:
    return random.Random(version).randbytes(size)


def upload_of(version: int, data: bytes) -> Upload:
    return Upload(policy(version), "lora", len(data), hashlib.sha256(data).hexdigest())


class Context(NamedTuple):
    """What StoreService needs of a PoolContext."""

    stopping: StopEvent
    exporter: Exporter
    watchdog: Watchdog


class WatchedStore(StoreService):
    """The store, and a place to stand between two chunks of it: `before_pull` runs in its thread, before each."""

    pulls: list[Pull]
    before_pull: Callable[[Pull], None] | None = None
    order: Sequence[str] = ()
    """Nodes whose next questions from whom to pull are heard in this order, once all have come."""
    early: dict[str, FindSource]

    def _on_relaying(self, node: str, message: Any) -> None:
        if not isinstance(message, FindSource) or node not in self.order:
            super()._on_relaying(node, message)
            return
        self.early[node] = message
        if len(self.early) == len(self.order):
            order, self.order = self.order, ()
            for each in order:
                super()._on_relaying(each, self.early.pop(each))

    def _on_pull(self, peer: str, pull: Pull) -> None:
        if self.before_pull is not None:
            self.before_pull(pull)
        self.pulls.append(pull)
        super()._on_pull(peer, pull)


class House:
    """A store in a thread, a trainer that uploads, and nodes that pull."""

    def __init__(
        self, folder: Path, max_staleness: int = MAX_STALENESS, fanout: int = 1, keys: Path | None = None
    ) -> None:
        """`keys`: a folder of a whole set."""
        self.fanout = fanout
        self.files, self.max_staleness = folder / "store", max_staleness
        self.scratch = folder / "node"
        self.scratch.mkdir()
        self.endpoint = f"ipc://{folder / 's'}"
        self.keys = keys
        self.relay_timeout_s = RELAY_TIMEOUT_S  # of the store, and of every node that relays
        self._closing: list[Callable[[], None]] = []
        self.open()
        self._trainer = self.link("trainer", "trainer")

    def open(self, keep: bool = False) -> None:
        self._killed = False
        self.stopping = StopEvent()
        keys = ServiceKeys(self.keys) if self.keys is not None else None
        self.server = Server(self.endpoint, run=RUN, token=TOKEN, name="store", keys=keys)
        files = PolicyFiles(self.files, RUN, self.max_staleness, keep)
        self.relays = Relays(self.fanout, self.relay_timeout_s)
        self.store = WatchedStore(Context(self.stopping, Exporter(), Watchdog()), self.server, files, self.relays)
        self.store.pulls, self.store.early = [], {}
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.store.serve()
        finally:
            if self._killed:
                self.server._peers.clear()  # here, where none can introduce itself again in between
            self.server.close()

    def link(self, role: Any, name: str) -> Client:
        keys = dial_keys(self.keys, role)
        client = Client(self.endpoint, run=RUN, token=TOKEN, role=role, name=name, peer="store", keys=keys)
        self._closing.append(lambda: client.close(0.2))
        client.connect(PATIENCE_S)
        return client

    def relaying_node(
        self, name: str, volunteers: bool = True, routed: bool = False, timeout_s: float | None = None
    ) -> Node:
        """A node that pulls from relays where the store says so, and perhaps is one itself."""
        timeout_s = self.relay_timeout_s if timeout_s is None else timeout_s
        relay = None
        if volunteers:
            keys = NodeDoorKeys(self.keys) if self.keys is not None else None
            server = Server(f"ipc://{self.files.parent / name}", run=RUN, token=TOKEN, name=name, keys=keys)
            relay = Relay(server, server.endpoint, timeout_s, keys)
            self._closing.append(relay.close)

        def dial(source: Source) -> Client:
            keys = dial_keys(self.keys, "node")
            keys = keys and keys.expecting(source.key)
            peer = f"relay {source.relay}"
            return Client(source.endpoint, run=RUN, token=TOKEN, role="node", name=name, peer=peer, keys=keys)

        return self.node(self.link("node", name), routed, relaying=Relaying(dial, timeout_s, "here", relay))

    def node(
        self, link: Client | None = None, routed: bool = False, read: Read | None = None,
        relaying: Relaying | None = None,
    ) -> Node:  # fmt: skip
        link = link or self.link("node", "node")
        folder = self.scratch
        if link.name != "node":  # a folder of its own, as every node has
            folder = self.scratch / link.name
            folder.mkdir()
        node = Node(link, folder, routed, read, relaying)
        self._closing.append(node.puller.close)
        return node

    def upload(self, version: int, data: bytes) -> bytes:
        """Until it is stored and announced."""
        self._trainer.send(upload_of(version, data), [data])
        assert self._trainer.receive(PATIENCE_S, "its upload").message == Stored(policy(version))
        return data

    def upload_as(
        self, identity: PolicyId, data: bytes, kind: str | None = None, parent: PolicyId | None = None
    ) -> None:
        upload = Upload(identity, kind or identity.name, len(data), hashlib.sha256(data).hexdigest(), parent)
        self._trainer.send(upload, [data])
        while self._trainer.receive(PATIENCE_S, "its upload").message != Stored(identity):
            pass  # of an earlier one: a store that was killed may say so twice

    def replace_trainer(self) -> None:
        """Another process, of the same name, after the first was killed: its link says no goodbye."""
        self._trainer = self.link("trainer", "trainer")

    def pin(self, version: int) -> None:
        self._trainer.send(PinPolicy(policy(version), True))

    def file(self, version: int) -> Path:
        (path,) = self.files.glob(f"{version}-*.policy")
        return path

    def kill(self) -> None:
        """As `kill -9`, with nothing lost that was acknowledged: no goodbye."""
        self._killed = True
        self.stop()

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        for close in reversed(self._closing):
            close()
        self.stop()


class Node:
    def __init__(
        self, link: Client, folder: Path, routed: bool = False, read: Read | None = None,
        relaying: Relaying | None = None,
    ) -> None:  # fmt: skip
        self.relaying = relaying
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.folder = folder
        self.puller = PolicyPuller(link, folder, self.inbox, routed, read, relaying)

    def next(self) -> Any:
        return self.inbox.get(timeout=PATIENCE_S)

    def expect(self, version: int, data: bytes) -> PolicyFetched:
        """The next thing that comes is this policy, byte for byte; its file is taken away, as a node does."""
        fetched = self.next()
        assert isinstance(fetched, PolicyFetched), fetched
        assert fetched.policy == policy(version)
        assert fetched.path.read_bytes() == data
        fetched.path.unlink()
        return fetched

    def expect_failure(self, version: int) -> str:
        """The next thing that comes is this policy's failure, and nothing of its file is left."""
        failed = self.next()
        assert isinstance(failed, PolicyFetchFailed), failed
        assert failed.policy == policy(version)
        assert list(self.folder.glob(f"{version}-*")) == []
        return failed.error


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)

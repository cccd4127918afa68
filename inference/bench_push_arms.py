"""The sender's side of the push benchmark, and the four ways that bytes go to the receivers.

    store          read the file, hash it, upload it to the real store's process, which makes it durable, announces it
                   and serves it in chunks: what a trainer and its nodes do
    relay          the same, and every receiver relays to others what it has: the store sends a few copies
    raw TCP        from memory to each receiver over a loopback socket, into memory that was touched before
    shared memory  one copy into a mapping that all processes share, a word to each receiver, and one copy out by each

The last two are what the machine can do, and no protocols: nothing is hashed, durable, resumed or flipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from async_rl.policy.adapter import write_adapter
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import last_line
from async_rl.version import PolicyId
from async_rl.wire.link import Client, LinkError, LinkTimeout
from async_rl.wire.messages import Stored, Upload
from async_rl.wire.parts import parts_of
from inference.bench_push_processes import LOOK_S, Receivers, cpu_seconds, end_process, start_store, store_config
from inference.bench_push_receiver import PATIENCE_S, Go, Join, Leave, PushError, Take, Taken, Way, make_adapter

# One thread a connection, and slices that a core's cache holds: the fastest way found for large adapters (160 MB to 1,
# 4 and 16 receivers: 38, 189, 780 ms; one connection after the other 60, 250, 1130 ms). For small ones it is slower.
SMALL_BYTES = 4 << 20
SLICE_BYTES = 1 << 20
ANY_PORT = "tcp://127.0.0.1:*"
ROTATED_FILES = 3  # adapters of one size that take turns, so that none is pushed to who still holds it

T = TypeVar("T")


class Push(NamedTuple):
    """One push: milliseconds from its start to the store's word that it is durable (0 where there is no store), and
    to the last receiver's fetched, verified and flipped (see Taken); and of CPU in all processes, idle ones too, and
    in a receiver that took part, on average."""

    stored_ms: float
    fetched_ms: float
    verified_ms: float
    flipped_ms: float
    cpu_ms: float = 0.0
    node_cpu_ms: float = 0.0


class AdapterFile(NamedTuple):
    path: Path
    digest: str
    nbytes: int


class PushHouse:
    """A run directory with a store process, the receivers, and adapters of every size. A context manager that leaves
    no process, socket or file behind; the shared memory has no name that could be left.

    `sizes` in bytes; an adapter's size is the nearest that a rank gives. `buffer` are keys of that section."""

    def __init__(self, sizes: Sequence[int], receivers: int, **buffer: Any) -> None:
        self._sizes = sizes
        self._buffer = buffer
        self._count = receivers
        self._version = 0
        self._exits = ExitStack()
        self.taken: list[Taken] = []
        """What each receiver said of the last push."""

    def __enter__(self) -> PushHouse:
        with ExitStack() as exits:
            self._folder = Path(tempfile.mkdtemp(prefix="async-rl-push-"))
            exits.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._adapters = {size: make_files(self._folder, size) for size in self._sizes}
            room = max(files[0].nbytes for files in self._adapters.values())
            self._run = RunDirectory.create(self._folder / "run", store_config(**self._buffer))
            exits.callback(self._run.remove_sockets)
            self._store = start_store(self._run)
            exits.callback(end_process, self._store)
            self.receivers = Receivers(self._count, room, self._folder, self._check_store)
            exits.callback(self.receivers.close)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def adapter_bytes(self, size: int) -> int:
        return self._adapters[size][0].nbytes

    def measure(self, way: Way, size: int, count: int, pushes: int) -> Push:
        """The median of each column over `pushes` pushes to `count` receivers, after one that is not counted: memory
        that a process touches for the first time is several times slower. Raises AsyncRLError."""
        opened = {
            "store": self._over_store, "relay": self._over_relays, "raw TCP": self._over_tcp,
            "shared memory": self._over_shared_memory,
        }  # fmt: skip
        with self._store_watched(), opened[way](self._adapters[size], count) as push:
            push()
            measured = [self._with_cpu(push, count) for _ in range(pushes)]
        return Push(*(statistics.median(column) for column in zip(*measured, strict=True)))

    def _with_cpu(self, push: Callable[[], Push], count: int) -> Push:
        pids = [*self.receivers.pids, os.getpid(), self._store.pid]
        before = [cpu_seconds(pid) for pid in pids]
        pushed = push()
        spent = [(cpu_seconds(pid) - was) * 1e3 for pid, was in zip(pids, before, strict=True)]
        return pushed._replace(cpu_ms=sum(spent), node_cpu_ms=sum(spent[:count]) / count)

    @contextmanager
    def _store_watched(self) -> Iterator[None]:
        """Whatever goes wrong, that the store has died is what people should hear."""
        try:
            yield
        except (LinkError, PushError):
            self._check_store()
            raise

    def _check_store(self) -> None:
        """A killed process says no goodbye, and a link is patient."""
        if self._store.poll() is not None:
            words = last_line(self._run.logs / "store.log")
            raise PushError(f"the store has died (exit code {self._store.returncode}); its last words: {words}")

    def _from_store(self, wait: Callable[[float], T], awaited: str) -> T:
        """What `wait`, called with seconds, returns before it raises LinkTimeout."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return wait(LOOK_S)
            except LinkTimeout as error:
                self._check_store()
                if time.monotonic() >= deadline:
                    raise PushError(f"waited {PATIENCE_S:.0f} s for {awaited} from the store") from error

    # --- the four ways ----------------------------------------------------------------------------------------------

    def _over_store(self, files: Sequence[AdapterFile], count: int) -> AbstractContextManager[Callable[[], Push]]:
        return self._by_the_store("store", files, [self._join() for _ in range(count)])

    def _over_relays(self, files: Sequence[AdapterFile], count: int) -> AbstractContextManager[Callable[[], Push]]:
        return self._by_the_store("relay", files, [self._join(relay_endpoint=ANY_PORT) for _ in range(count)])

    def _join(self, endpoint: str = "", **relaying: Any) -> Join:
        return Join(endpoint or self._run.store_endpoint, self._run.run_id, self._run.token, **relaying)

    @contextmanager
    def _by_the_store(
        self, way: Way, files: Sequence[AdapterFile], joins: Sequence[Join]
    ) -> Iterator[Callable[[], Push]]:
        link = Client(
            self._run.store_endpoint, run=self._run.run_id, token=self._run.token, role="trainer", name="trainer",
            peer="the store",
        )  # fmt: skip
        try:
            self._from_store(link.connect, "a welcome")
            with self._joined(joins):
                yield lambda: self._push_to_store(way, link, files, len(joins))
        finally:
            link.close()

    def _push_to_store(self, way: Way, link: Client, files: Sequence[AdapterFile], count: int) -> Push:
        """The messages of a trainer's publisher: the file is read and hashed within the time."""
        started, stored = self._send_to_store(way, link, files, count)
        return self._taken(started, stored, count)

    def _send_to_store(
        self, way: Way, link: Client, files: Sequence[AdapterFile], count: int
    ) -> tuple[float, float]:
        """When the push began, and when it was stored."""
        self._version += 1
        file = files[self._version % len(files)]
        policy = PolicyId("main", self._version, file.digest)
        self.receivers.order(count, Take(way, file.nbytes, policy.version))
        started = time.monotonic()
        for upload, part in parts_of(file.path, Upload(policy, "lora", file.nbytes, "")):
            link.send(upload, [part])
        awaited = f"the word that policy {policy.short()} is stored"
        answer = self._from_store(partial(link.receive, awaiting=awaited), awaited).message
        stored = time.monotonic()
        if answer != Stored(policy):
            raise PushError(f"the store answered an upload of {policy.short()} with {answer}")
        return started, stored

    @contextmanager
    def _over_tcp(self, files: Sequence[AdapterFile], count: int) -> Iterator[Callable[[], Push]]:
        data = files[0].path.read_bytes()
        with ExitStack() as sockets, socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
            listener.settimeout(PATIENCE_S)
            with self._joined([Join(port=listener.getsockname()[1])] * count):
                connections = [sockets.enter_context(accept(listener)) for _ in range(count)]
                yield lambda: self._push_over_tcp(connections, data)

    def _push_over_tcp(self, connections: Sequence[socket.socket], data: bytes) -> Push:
        self.receivers.order(len(connections), Take("raw TCP", len(data)))
        started = time.monotonic()
        if len(data) <= SMALL_BYTES:
            for connection in connections:
                send_slices(connection, data)
        else:
            senders = [threading.Thread(target=send_slices, args=(connection, data)) for connection in connections]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(PATIENCE_S)
        return self._taken(started, started, len(connections))

    @contextmanager
    def _over_shared_memory(self, files: Sequence[AdapterFile], count: int) -> Iterator[Callable[[], Push]]:
        data = files[0].path.read_bytes()
        with memoryview(self.receivers.shared) as shared:
            yield lambda: self._push_over_shared_memory(shared, data, count)

    def _push_over_shared_memory(self, shared: memoryview, data: bytes, count: int) -> Push:
        self.receivers.order(count, Take("shared memory", len(data)))
        started = time.monotonic()
        shared[: len(data)] = data
        self.receivers.send(count, Go())
        return self._taken(started, started, count)

    def _taken(self, started: float, stored: float, count: int) -> Push:
        self.taken = taken = self.receivers.answers(count, Taken, "a push to arrive")
        fetched = max(answer.fetched for answer in taken)
        verified = max(answer.verified for answer in taken)
        flipped = max(answer.flipped for answer in taken)
        return Push(*((moment - started) * 1e3 for moment in (stored, fetched, verified, flipped)))

    @contextmanager
    def _joined(self, joins: Sequence[Join]) -> Iterator[None]:
        """Between two orders. After an error nobody is told to leave: some may not listen, and all are to end."""
        self.receivers.order_each(joins)
        yield
        self.receivers.order(len(joins), Leave())


def send_slices(connection: socket.socket, data: bytes) -> None:
    """A receiver that is gone says so, or is missed, elsewhere."""
    whole = memoryview(data)
    with contextlib.suppress(OSError):
        for start in range(0, len(data), SLICE_BYTES):
            connection.sendall(whole[start : start + SLICE_BYTES])


def accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE_S)
    return connection


def make_files(folder: Path, size: int) -> list[AdapterFile]:
    files = []
    for number in range(ROTATED_FILES):
        path = folder / f"{size}-{number}.safetensors"
        digest = write_adapter(path, *make_adapter(size, seed=number))
        files.append(AdapterFile(path, digest, path.stat().st_size))
    return files

"""What every arm of the transport benchmark shares, and the arms without a buffer: raw ZeroMQ, lists, a queue.

A trajectory is three arrays of n tokens: ids int32, log-probabilities float32, mask uint8, 9 bytes a token. In every
arm each producer packs every trajectory anew from numpy arrays that it made before, and the receiver ends with numpy
arrays: it copies them into a ring that is used again and again, and samples a batch of 32 from it for every 32 that
came in. All processes are started anew for each measurement; all sockets are TCP on the loopback interface.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from async_rl.errors import AsyncRLError
from async_rl.run.bench import Measures
from async_rl.run.process import die_with_parent
from async_rl.trajectory import BYTES_PER_TOKEN

SAMPLED = 32  # a batch of so many is sampled for every so many received
RING_ROWS = 256
PREPARED = 16  # different trajectories a producer packs in turn
WAITING_MESSAGES = 64  # in each socket and in the queue: deeper ones only cost memory that is fresh each time
VOCABULARY = 50_000
START_S = 30.0  # for all processes to start and the first trajectory to arrive
END_S = 5.0  # for a process that was told to end


class BenchError(AsyncRLError):
    """A measurement that did not happen as it should have."""


class Load(NamedTuple):
    """What one measurement carries: trajectories of `tokens` from `producers` processes, for `warm_s` seconds before
    anything is measured and `window_s` while it is."""

    tokens: int
    producers: int
    warm_s: float
    window_s: float

    @property
    def nbytes(self) -> int:
        """Of one trajectory's arrays."""
        return self.tokens * BYTES_PER_TOKEN


class Arrays(NamedTuple):
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint8]


def prepared(tokens: int, seed: int) -> Iterator[Arrays]:
    """PREPARED trajectories, over and over. The first eighth of each is a prompt."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(tokens) < max(1, tokens // 8)).astype(np.uint8)
    made = [
        Arrays(
            rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
            -rng.random(tokens, dtype=np.float32) * (mask == 0),
            mask,
        )
        for _ in range(PREPARED)
    ]
    return itertools.cycle(made)


class Ring:
    """The receiver's arrays. `count` is how many trajectories it was given, for the process that measures."""

    def __init__(self, tokens: int, count: Any) -> None:
        self._count = count
        self._next = 0
        self._rng = np.random.default_rng(0)
        self._rows = [np.zeros((RING_ROWS, tokens), dtype) for dtype in (np.int32, np.float32, np.uint8)]
        self._batch = [np.zeros((SAMPLED, tokens), dtype) for dtype in (np.int32, np.float32, np.uint8)]

    def add(self, arrays: Iterable[npt.NDArray[Any]]) -> None:
        row = self._next % RING_ROWS
        for place, array in zip(self._rows, arrays, strict=True):
            place[row] = array
        self._next += 1
        if self._next % SAMPLED == 0:
            chosen = self._rng.integers(0, min(self._next, RING_ROWS), SAMPLED)
            for rows, batch in zip(self._rows, self._batch, strict=True):
                np.take(rows, chosen, axis=0, out=batch, mode="clip")  # with "raise" numpy would make a copy
            self._count.value = self._next


# --- processes -------------------------------------------------------------------------------------------------------


class Crew:
    """The processes of one measurement; they end with it."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.count: Any = self.context.RawValue(ctypes.c_longlong, 0)
        self.pids: list[int] = []
        self._processes: list[SpawnProcess] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_S)

    def start(self, target: Callable[..., None], *arguments: Any) -> None:
        process = self.context.Process(target=_child, args=(os.getpid(), target, arguments), daemon=True)
        process.start()
        assert process.pid is not None
        self.pids.append(process.pid)
        self._processes.append(process)

    def check(self) -> None:
        """Raises BenchError when a process has ended: none does by itself."""
        for process in self._processes:
            if process.exitcode is not None:
                raise BenchError(f"a process of the benchmark ended with exit code {process.exitcode}")

    def wait_until(self, condition: Callable[[], bool], awaited: str, timeout_s: float = START_S) -> None:
        """Raises BenchError after `timeout_s`, or when a process has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise BenchError(f"waited {timeout_s:g} s for {awaited}")
            time.sleep(0.002)

    def cpu_s(self) -> float:
        """Seconds of processor time that all processes have used so far."""
        return sum(map(cpu_s, self.pids))


def _child(parent: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    target(*arguments)


def cpu_s(pid: int) -> float:
    """Processor time of a process's threads. Linux counts it in nanoseconds where the scheduler's statistics are built
    in, else in ticks of some 10 ms."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steady(crew: Crew, load: Load) -> Measures:
    """Measure a stream that runs by itself, after its warm-up."""
    crew.wait_until(lambda: crew.count.value > 0, "the first trajectories to arrive")
    time.sleep(load.warm_s)
    count, used, started = crew.count.value, crew.cpu_s(), time.monotonic()
    time.sleep(load.window_s)
    count, used, seconds = crew.count.value - count, crew.cpu_s() - used, time.monotonic() - started
    crew.check()
    return measures(load, count, seconds, used)


def measures(load: Load, count: int, seconds: float, used: float) -> Measures:
    if not count:
        raise BenchError("nothing arrived while it was measured")
    return {
        "traj_per_s": count / seconds,
        "cpu_us_per_traj": used / count * 1e6,
        "mb_per_s": count * load.nbytes / seconds / 1e6,
    }


# --- raw ZeroMQ: one frame, or lists of numbers ----------------------------------------------------------------------


class Frame(msgspec.Struct, array_like=True):
    """A trajectory as one msgpack message with binary fields."""

    index: int
    reward: float
    tokens: memoryview
    logprobs: memoryview
    mask: memoryview


class Lists(msgspec.Struct, array_like=True):
    """The same as lists of numbers."""

    index: int
    reward: float
    tokens: list[int]
    logprobs: list[float]
    mask: list[int]


def pack_frame(index: int, arrays: Arrays) -> Frame:
    return Frame(index, 1.0, arrays.tokens.data, arrays.logprobs.data, arrays.mask.data)


def pack_lists(index: int, arrays: Arrays) -> Lists:
    return Lists(index, 1.0, arrays.tokens.tolist(), arrays.logprobs.tolist(), arrays.mask.tolist())


def unpack_frame(frame: Frame) -> Arrays:
    return Arrays(
        np.frombuffer(frame.tokens, np.int32), np.frombuffer(frame.logprobs, np.float32),
        np.frombuffer(frame.mask, np.uint8),
    )  # fmt: skip


def unpack_lists(lists: Lists) -> Arrays:
    return Arrays(
        np.array(lists.tokens, np.int32), np.array(lists.logprobs, np.float32), np.array(lists.mask, np.uint8)
    )


class CurveKeys(NamedTuple):
    """Of the receiver, and one pair for all senders."""

    server_public: bytes
    server_secret: bytes
    public: bytes
    secret: bytes


def measure_push(load: Load, lists: bool, curve: bool = False) -> Measures:
    keys = CurveKeys(*zmq.curve_keypair(), *zmq.curve_keypair()) if curve else None
    with Crew() as crew:
        endpoint: Any = crew.context.SimpleQueue()
        crew.start(_pull, endpoint, load, lists, crew.count, keys)
        crew.wait_until(lambda: not endpoint.empty(), "the receiver to start")
        address = endpoint.get()
        for seed in range(load.producers):
            crew.start(_push, address, load, lists, seed, keys)
        return steady(crew, load)


def _push(address: str, load: Load, lists: bool, seed: int, keys: CurveKeys | None) -> None:
    encode = msgspec.msgpack.Encoder().encode
    pack: Callable[[int, Arrays], Any] = pack_lists if lists else pack_frame
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, WAITING_MESSAGES)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.connect(address)
        for index, arrays in enumerate(prepared(load.tokens, seed)):
            socket.send(encode(pack(index, arrays)))


def _pull(endpoint: Any, load: Load, lists: bool, count: Any, keys: CurveKeys | None) -> None:
    decode: Callable[[Any], Any] = msgspec.msgpack.Decoder(Lists if lists else Frame).decode
    unpack: Callable[[Any], Arrays] = unpack_lists if lists else unpack_frame
    ring = Ring(load.tokens, count)
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        endpoint.put(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        while True:
            ring.add(unpack(decode(socket.recv())))


# --- a multiprocessing queue -----------------------------------------------------------------------------------------


def measure_queue(load: Load) -> Measures:
    with Crew() as crew:
        queue: Any = crew.context.Queue(WAITING_MESSAGES)
        crew.start(_get, queue, load, crew.count)
        for seed in range(load.producers):
            crew.start(_put, queue, load, seed)
        return steady(crew, load)


def _put(queue: Any, load: Load, seed: int) -> None:
    for index, arrays in enumerate(prepared(load.tokens, seed)):
        queue.put((index, 1.0, *arrays))


def _get(queue: Any, load: Load, count: Any) -> None:
    ring = Ring(load.tokens, count)
    while True:
        ring.add(queue.get()[2:])

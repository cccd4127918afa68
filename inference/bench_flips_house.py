"""The processes of the benchmark of flips, and the clock: a store, a node with the engine, and this one as the trainer.

here ── upload ──> policy store ── announce, chunks ──> node: puller, engine
  ^                                                       │
  └──────────── a pipe: Flip, Sampled ────────────────────┘
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.inference_config import interpreter
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import child_environment, last_line
from async_rl.run.process import die_with_parent
from async_rl.wire.link import Client, LinkTimeout
from async_rl.wire.messages import Stored
from async_rl.wire.parts import parts_of
from inference.bench_flips_node import AnyWord, Failed, Flip, Ready, Sampled
from inference.bench_flips_policies import policy_maker
from inference.bench_push_processes import end_process, start_store

LOOK_S = 0.2  # between looks, in a wait, at the processes that it depends on
START_S = 900.0  # for an engine: one that compiles, or loads a large model
PUSH_S = 300.0  # for one policy, to its first token
END_S = 30.0
LOG_LINES = 60  # of the node's log, when it fails
KEPT_FILES = 3  # of policies that were uploaded

W = TypeVar("W", bound=AnyWord)


class FlipsError(AsyncRLError):
    """The benchmark cannot go on; the message says what ended, or who waited for what."""


class NoStart(FlipsError):
    """The engine did not start so: why, and the same with the end of the node's log."""

    def __init__(self, why: str, words: str) -> None:
        super().__init__(words)
        self.why = why


class Push(NamedTuple):
    """Milliseconds from when the trainer begins to write a policy: to the store's word that it is durable, until the
    node has all of it, until new requests start under it, and until the first token is sampled under it."""

    stored_ms: float
    fetched_ms: float
    flipped_ms: float
    first_ms: float


class FlipsHouse:
    """A context manager that leaves no process, socket or file behind. `config` is that of the node: its own group's,
    its model by path. Raises NoStart when the engine does not start, or does not offer what the config asks for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._version = -1
        self._flips: dict[int, Flip] = {}
        self._sampled: list[Sampled] = []
        self._exits = ExitStack()

    def __enter__(self) -> FlipsHouse:
        with ExitStack() as exits:
            self._folder = Path(tempfile.mkdtemp(prefix="async-rl-flips-"))
            exits.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._run = RunDirectory.create(self._folder / "run", self._config)
            exits.callback(self._run.remove_sockets)
            self._store = start_store(self._run)
            exits.callback(end_process, self._store)
            self._node, self._pipe = start_node(self._config, self._run)
            exits.callback(end_node, self._node)
            exits.callback(self._pipe.close)
            self._link = Client(
                self._run.store_endpoint, run=self._run.run_id, token=self._run.token, role="trainer", name="trainer",
                peer="the store",
            )  # fmt: skip
            exits.callback(self._link.close)
            self._within(START_S, "a welcome from the store", self._connected)
            self._maker = policy_maker(self._config, Path(self._config.model.path))
            ready = self._within(START_S, "the engine to start", lambda: self._heard(Ready))
            self.engine, self.describe = ready.engine, ready.describe
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def push(self) -> Push:
        """One policy, all the way. The digest is part of it, as the file is written with it."""
        self._version += 1
        version, policy = self._version, self._maker.make(self._version)
        path = self._folder / f"{version % KEPT_FILES}.safetensors"
        started = time.monotonic()
        digest = policy.write(path)
        upload = policy.upload(digest, path.stat().st_size)
        for message, part in parts_of(path, upload):
            self._link.send(message, [part])
        self._within(PUSH_S, f"the store's word on policy {version}", lambda: self._is_stored(Stored(upload.policy)))
        stored = time.monotonic()
        flip = self._within(PUSH_S, f"a token under policy {version}", lambda: self._flip(version))
        moments = (stored, flip.fetched, flip.flipped, flip.first_token)
        return Push(*((moment - started) * 1e3 for moment in moments))

    def rest(self, seconds: float) -> None:
        """Listen to the node, and do nothing else."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._listen(min(left, LOOK_S))
            self._check()

    def sampled(self, start: float, end: float) -> dict[str, float]:
        """Between two times of the monotonic clock: tokens a second, of requests that were done, and the mean of how
        many requests the engine would have had in flight."""
        told = self._within(PUSH_S, "what was done by then", lambda: self._told_until(end))
        first, last = np.interp([start, end], [word.at for word in told], [word.tokens for word in told])
        limits = [word.limit for word in told if start <= word.at <= end] or [told[-1].limit]
        return {"tokens_per_s": float(last - first) / (end - start), "limit": float(np.mean(limits))}

    def _told_until(self, end: float) -> list[Sampled] | None:
        self._listen(LOOK_S)
        return self._sampled if self._sampled and self._sampled[-1].at >= end else None

    # --- what comes --------------------------------------------------------------------------------------------------

    def _within(self, seconds: float, awaited: str, look: Callable[[], W | bool | None]) -> W:
        """What `look` returns, once that is something; it waits a little itself. Raises FlipsError."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            self._check()
            if time.monotonic() > deadline:
                raise FlipsError(f"waited {seconds:.0f} s for {awaited}")
        return found  # type: ignore[return-value]

    def _connected(self) -> bool:
        try:
            self._link.connect(LOOK_S)
            return True
        except LinkTimeout:
            return False

    def _is_stored(self, word: Stored) -> bool:
        """The pipe is short, so what the node says meanwhile is read, too."""
        self._listen(0.0)
        try:
            return self._link.receive(LOOK_S, "the store's word on a policy").message == word
        except LinkTimeout:
            return False

    def _flip(self, version: int) -> Flip | None:
        self._listen(LOOK_S)
        return self._flips.pop(version, None)

    def _heard(self, kind: type[Ready]) -> Ready | None:
        if not self._pipe.poll(LOOK_S):
            return None
        word = self._hear()
        return word if isinstance(word, kind) else None

    def _listen(self, seconds: float) -> None:
        """Everything that the node has said; waits so long for the first, and returns when it has come."""
        while self._pipe.poll(seconds):
            seconds = 0.0
            word = self._hear()
            if isinstance(word, Flip):
                self._flips[word.version] = word
            elif isinstance(word, Sampled):
                self._sampled.append(word)

    def _hear(self) -> AnyWord:
        try:
            word: AnyWord = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=AnyWord)
        except (EOFError, OSError):
            self._node.wait(LOOK_S)
            self._check()
            raise FlipsError("the node has hung up") from None
        if isinstance(word, Failed):
            raise self._failure(word.error)
        return word

    def _failure(self, error: str) -> FlipsError:
        """With what the node's log said last, as the folder that it lies in is taken away."""
        lines = (self._run.logs / "node.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        words = "\n".join([error, "The node's log ended so:", *lines])
        return FlipsError(words) if self._version >= 0 else NoStart(error, words)

    def _check(self) -> None:
        for name, process in (("store", self._store), ("node", self._node)):
            if process.poll() is not None and not (name == "node" and self._pipe.poll(0.0)):
                words = last_line(self._run.logs / f"{name}.log")
                raise FlipsError(f"the {name} has died (exit code {process.returncode}); its last words: {words}")


def start_node(config: Config, run: RunDirectory) -> tuple[subprocess.Popen[bytes], Connection]:
    """The node's process, in the interpreter that a node of the config has, and our end of its pipe."""
    parent = os.getpid()
    python = interpreter(config.inference) if config.inference.engine == "vllm" else ""
    ours, theirs = os.pipe()
    with (run.logs / "node.log").open("wb") as log, _closing(theirs):
        process = subprocess.Popen(
            [
                python or sys.executable, "-P", "-m", "inference.bench_flips_node",
                "--config", str(run.config_path), "--dir", str(run.path), "--pipe", str(theirs),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(python),
            pass_fds=[theirs],
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
    return process, Connection(ours, writable=False)


def end_node(process: subprocess.Popen[bytes]) -> None:
    """An engine may take a while to end its own processes, and gets it."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    end_process(process)


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)

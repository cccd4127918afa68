"""The processes of the push benchmark: the policy store, started as a run starts it, and the receivers, forked."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

from async_rl.config import Config, config_from_table
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import child_environment
from async_rl.run.process import die_with_parent
from inference.bench_push_receiver import (
    PATIENCE_S,
    Answer,
    AnyAnswer,
    Failed,
    Order,
    PushError,
    Ready,
    hear,
    receiver_main,
    tell,
)

LOOK_S = 0.2  # between looks, in a wait, at the processes that it depends on
END_S = 5.0  # for a process that was asked to end

A = TypeVar("A", bound=Answer)


class Receivers:
    """`count` receiver processes and the pipes to them. Forked, not started: importing torch takes each two seconds,
    and forked ones share the base model. So this comes before any thread, and a caller that has some is refused.
    `look` is called while answers are awaited; it raises when they will not come."""

    def __init__(self, count: int, room: int, folder: Path, look: Callable[[], None]) -> None:
        if threading.active_count() > 1:
            raise PushError("receivers must be forked before there are threads")
        self._look = look
        self.shared = mmap.mmap(-1, room)
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        fork = multiprocessing.get_context("fork")
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page that it marks
        for index in range(count):
            ours, theirs = fork.Pipe()
            self._pipes.append(ours)
            name = f"receiver-{index}"
            scratch = folder / name
            scratch.mkdir()
            process = fork.Process(
                target=receiver_main,
                args=(os.getpid(), name, theirs, self.shared, room, scratch, list(self._pipes)),
                name=name,
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            theirs.close()
        gc.unfreeze()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join(END_S)
        for pipe in self._pipes:
            pipe.close()

    def order(self, count: int, order: Order) -> None:
        """Tell the first `count` receivers and wait until all are ready."""
        self.send(count, order)
        self.answers(count, Ready, f"the answer to {type(order).__name__}")

    def order_each(self, orders: Sequence[Order]) -> None:
        """As `order`, to the first receivers, each its own."""
        for index, order in enumerate(orders):
            self._tell(index, order)
        self.answers(len(orders), Ready, f"the answer to {type(orders[0]).__name__}")

    def send(self, count: int, order: Order) -> None:
        for index in range(count):
            self._tell(index, order)

    def _tell(self, index: int, order: Order) -> None:
        process = self._processes[index]
        try:
            tell(self._pipes[index], order)
        except OSError as error:
            raise PushError(f"{process.name} is gone (exit code {process.exitcode})") from error

    def answers(self, count: int, kind: type[A], awaited: str, without: Collection[int] = ()) -> list[A]:
        """One answer of each of the first `count`, but for those `without`. Raises PushError when one fails, dies or
        does not answer."""
        deadline = time.monotonic() + PATIENCE_S
        return [self._answer(index, kind, deadline, awaited) for index in range(count) if index not in without]

    def _answer(self, index: int, kind: type[A], deadline: float, awaited: str) -> A:
        process, pipe = self._processes[index], self._pipes[index]
        while not pipe.poll(LOOK_S):
            self._look()
            if time.monotonic() >= deadline:
                raise PushError(f"{process.name}: waited {PATIENCE_S:.0f} s for {awaited}")
        try:
            answer = hear(pipe, AnyAnswer)
        except (EOFError, OSError) as error:
            process.join(END_S)
            raise PushError(f"{process.name} died (exit code {process.exitcode}) before {awaited}") from error
        if isinstance(answer, Failed):
            raise PushError(answer.error)
        if not isinstance(answer, kind):
            raise PushError(f"{process.name} said {answer} instead of {awaited}")
        return answer


def store_config(**buffer: Any) -> Config:
    """As of a run on one machine; only what the store reads matters. The bound is 0 so that few old versions stay."""
    table = {"model": {"path": "none"}, "task": {"kind": "digit_sort"}, "buffer": {"max_staleness": 0} | buffer}
    return config_from_table(table, "bench push")


def start_store(run: RunDirectory) -> subprocess.Popen[bytes]:
    """The real store, by its module's name: this pool cannot import it."""
    parent = os.getpid()
    with (run.logs / "store.log").open("wb") as log:
        return subprocess.Popen(
            [
                sys.executable, "-P", "-m", "buffer.store",
                "--config", str(run.config_path), "--dir", str(run.path), "--name", "store",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip


def end_process(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process of ours; 0 where the system cannot say. Linux makes such a clock of a process id
    (clock_getcpuclockid(3), which Python does not have)."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0

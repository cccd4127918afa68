"""The other ranks on this machine: rank 0 starts them, watches them and ends them.

A collective cannot end when one of its ranks is gone, and nothing that the main thread does would notice. So a thread
looks after the ranks, and ends the whole trainer with one line that says which rank it was and what became of it, and
with the exit code that asks for another start (`EXIT_AGAIN`) where that may help. They die with rank 0.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from async_rl.run.launch import child_environment, last_line
from async_rl.run.process import EXIT_AGAIN, die_with_parent

LOOK_S = 0.2
TELL_S = 0.5  # after one rank ended, for the others that ended with it to be seen: one that was killed is the cause
STOPPED_S = 30.0  # how long a rank may be stopped (SIGSTOP, a debugger) before it counts as lost
FAILED_S = 10.0  # how long the others may take to end a call of which one rank has failed
END_S = 10.0  # for the ranks to end by themselves


class Child:
    """A rank's process, and where it logs to."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path | None) -> None:
        self.rank = rank
        self.process = process
        self.log = log
        self.stopped_since: float | None = None

    @property
    def fate(self) -> str:
        """How it ended, or that it is stopped; empty while it runs."""
        code = self.process.poll()
        where = f"; log: {self.log}" if self.log else ""
        if code is None:
            long = self.stopped_since is not None and time.monotonic() - self.stopped_since > STOPPED_S
            return f"rank {self.rank} has been stopped for {STOPPED_S:g} s{where}" if long else ""
        if code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-code).name}{where}"
        words = last_line(self.log) if self.log else ""
        return f"rank {self.rank} ended with exit code {code}{': ' + words if words else ''}{where}"

    def look(self) -> None:
        """Whether it is stopped, which only Linux says."""
        if not _is_stopped(self.process.pid):
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()


class Children:
    """`arguments` are each rank's command line after the interpreter, `logs` the folder of NAME-rankN.log, None for the
    terminal; `folder` is where they meet, which goes with them. To be used
    from the main thread: the kernel ends children with the thread that started them."""

    def __init__(self, arguments: Sequence[Sequence[str]], name: str, logs: Path | None, folder: Path) -> None:
        self._folder = folder
        self._ending = threading.Event()
        self._last_words = threading.Lock()
        self._children: list[Child] = []
        environment = child_environment() | {"TORCH_COMPILE_DISABLE": os.environ.get("TORCH_COMPILE_DISABLE", "0")}
        try:
            for rank, line in enumerate(arguments, 1):
                log = logs / f"{name}-rank{rank}.log" if logs else None
                self._children.append(Child(rank, _start(line, log, environment), log))
        except BaseException:
            self.kill()
            raise

    def watch(self, failure: Callable[[], str]) -> None:
        """From now on, a rank that is lost ends this process. `failure` says what a rank failed of while the others are
        in the same call, "" if none did."""
        threading.Thread(target=self._keep_watch, args=(failure,), name="ranks", daemon=True).start()

    def lost(self, error: Exception) -> NoReturn:
        """A rank did not answer: end this process, with what is known."""
        deadline = time.monotonic() + TELL_S
        while time.monotonic() < deadline and not self._fate():
            time.sleep(LOOK_S / 4)
        time.sleep(TELL_S)
        self._end_process(self._fate() or f"the ranks do not answer each other: {error}", EXIT_AGAIN)

    def end(self) -> None:
        """They have been told to end, and are given a while for it. Raises nothing."""
        self._ending.set()
        deadline = time.monotonic() + END_S
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        self._ending.set()
        for child in self._children:
            if child.process.poll() is None:
                child.process.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):  # one that its disk holds
                child.process.wait(timeout=END_S)

    def _keep_watch(self, failure: Callable[[], str]) -> None:
        """Without a watch nothing would end a trainer that waits in vain, so it does not outlive one."""
        try:
            self._watch(failure)
        except Exception as error:
            self._end_process(f"nobody looks after the ranks any more: {type(error).__name__}: {error}", 1)

    def _watch(self, failure: Callable[[], str]) -> None:
        failing_since: float | None = None
        while not self._ending.wait(LOOK_S):
            if self._fate():
                if self._ending.wait(TELL_S):
                    return
                self._end_process(self._fate(), EXIT_AGAIN)
            if not (text := failure()):
                failing_since = None
            elif failing_since is None:
                failing_since = time.monotonic()
            elif time.monotonic() - failing_since > FAILED_S:
                self._end_process(f"{text}; the others wait for it in vain", 1)

    def _fate(self) -> str:
        """Of the rank that is lost, of several one that was killed: the others ended because of it."""
        for child in self._children:
            child.look()
        fates = [(child.process.returncode, child.fate) for child in self._children]
        return min(((0 if (code or 1) < 0 else 1, fate) for code, fate in fates if fate), default=(0, ""))[1]

    def _end_process(self, words: str, code: int) -> NoReturn:
        """At once: the main thread may wait for what never comes."""
        if not self._last_words.acquire(blocking=False):  # the other thread ends the process
            time.sleep(2 * END_S)
        print(f"error: {' '.join(words.split())}", file=sys.stderr, flush=True)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(code)


def _start(line: Sequence[str], log: Path | None, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    output: IO[bytes] | None = log.open("ab") if log else None
    parent = os.getpid()
    try:
        return subprocess.Popen(
            [sys.executable, "-P", *line],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env=environment,
            preexec_fn=lambda: die_with_parent(parent),
        )
    finally:
        if output:
            output.close()


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")

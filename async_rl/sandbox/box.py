"""Programs are run here: the side of whoever wants them run, and its words for how they end."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.sandbox.cell import READ_BYTES, Cell, SandboxError, refusal
from async_rl.sandbox.limits import DEFAULT, Limits
from async_rl.sandbox.probe import PROBE, PROBE_LIMITS

START_TIMEOUT_S = 60.0  # for a bare interpreter, on a busy machine
GRACE_S = 20.0  # beyond its wall time, after which a cell's keeper counts as lost
JUDGE_MORE_S = 2.0  # of time and memory for the tests, so that a program comes to its limits first
JUDGE_MORE_MB = 256


class ToolResult(NamedTuple):
    """What came of a program. `reason` is "ok", "error" (it raised, or ended with another code than 0), or what ended
    it: "timeout", "cpu", "memory", "disk", "files", "processes", "output", "forbidden", "signal"."""

    stdout: str
    stderr: str
    reason: str
    seconds: float


class Verdict(NamedTuple):
    """What tests say of a program: how many assertions held, and how many did not. `reason` is "passed", "wrong",
    "syntax", "undefined", "result" (it answered with no plain value, or no answer), "exit", or one of ToolResult's;
    `note` what failed first. `broken` is not empty where the tests themselves are at fault."""

    passed: int
    failed: int
    reason: str
    note: str
    broken: str
    seconds: float


class Sandbox:
    """A warden and its cells. Programs may be run from several threads at once. `close` ends them all.

    Raises SandboxError where the machine cannot isolate a program: that is tried at the start."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise SandboxError(refusal(f"this is {sys.platform}"))
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(__file__).resolve().parents[2])
        environment = {"PYTHONPATH": package, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        with theirs, cannot_start(self._orders):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-m", "async_rl.sandbox.warden"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, cwd="/", start_new_session=True,
            )  # fmt: skip
        try:
            self._orders.settimeout(START_TIMEOUT_S)
            if not self._orders.recv(1):
                raise SandboxError("the sandbox's warden ended while it started: see its message above")
            self._try_walls()
        except TimeoutError:
            self.close()
            raise SandboxError(f"the sandbox's warden has not started within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The warden's end is that of all its cells."""
        self._orders.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, source: str, limits: Limits = DEFAULT) -> ToolResult:
        """Run one program as `python FILE` would, with nothing on its standard input."""
        cell = self._start("script", {"source": source}, limits, [])
        try:
            self._watch([cell])
            out, err = cell.texts()
            return ToolResult(out, err, cell.reason(), cell.end["wall"] if cell.end else math.nan)
        finally:
            cell.close()

    def judge(self, source: str, setup: str, tests: str, entry_point: str, limits: Limits = DEFAULT) -> Verdict:
        """Define what `source` defines in one cell, and in another run `tests` against it: after `setup`, which makes
        what they need besides, every other name that they use is a function of the program's, and where they define
        `check`, that is called with its function `entry_point`."""
        start = time.monotonic()
        asked, answers = socket.socketpair()
        verdict, spoken = socket.socketpair()
        room = limits._replace(wall_s=limits.wall_s + JUDGE_MORE_S, memory_mb=limits.memory_mb + JUDGE_MORE_MB)
        given = {"setup": setup, "tests": tests, "entry_point": entry_point}
        cells: list[Cell] = []
        try:
            with asked, answers, spoken:
                cells.append(self._start("program", {"source": source}, limits, [answers.fileno()]))
                cells.append(self._start("judge", given, room, [asked.fileno(), spoken.fileno()]))
            program, judge = cells
            self._watch([program, judge], last=judge)
            return verdict_of(program, judge, read_verdict(verdict), time.monotonic() - start)
        finally:
            verdict.close()
            for cell in cells:
                cell.close()

    def _start(self, kind: str, payload: dict[str, Any], limits: Limits, more: list[int]) -> Cell:
        """Order one cell. What it runs goes by a file in memory, which nobody else reads."""
        ours, theirs = socket.socketpair()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        given = os.memfd_create("given")
        try:
            with open(given, "wb", closefd=False) as file:
                file.write(json.dumps(payload).encode())
            os.lseek(given, 0, os.SEEK_SET)
            order = json.dumps({"kind": kind, "limits": limits}).encode()
            socket.send_fds(self._orders, [order], [theirs.fileno(), given, out_end, err_end, *more])
        except OSError as error:
            ours.close()
            os.close(out)
            os.close(err)
            raise SandboxError(f"the sandbox's warden is gone: {error}") from error
        finally:
            theirs.close()
            for file_number in (given, out_end, err_end):
                os.close(file_number)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        return Cell(ours, [out, err], limits)

    def _watch(self, cells: list[Cell], last: Cell | None = None) -> None:
        """Until all have ended: take in what they print, and end those that print too much, and all when `last` has.
        Raises SandboxError when a keeper is lost."""
        deadline = time.monotonic() + max(cell.limits.wall_s for cell in cells) + GRACE_S
        words = {cell.word.fileno(): cell for cell in cells}
        with selectors.DefaultSelector() as selector:
            for word, cell in words.items():
                for file in (word, *cell.printed):
                    selector.register(file, selectors.EVENT_READ, cell)
            while any(cell.end is None for cell in cells):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.close()
                    raise SandboxError(f"a cell has not ended {GRACE_S:g} s after its time: all were killed")
                for key, _ in ready:
                    if key.fd in words:
                        words[key.fd].hear()
                        selector.unregister(key.fd)
                    elif not key.data.read(key.fd):
                        selector.unregister(key.fd)
                    if last is not None and last.end is not None:
                        for other in cells:
                            other.stop()
        for cell in cells:
            for file in cell.printed:
                while cell.read(file):
                    pass

    def _try_walls(self) -> None:
        """One program behind the walls: what cannot be put up says so, what does not hold is found."""
        result = self.run(PROBE, PROBE_LIMITS)
        if result.reason != "ok":
            detail = (result.stderr.strip().splitlines() or [result.reason])[-1]
            raise SandboxError(refusal(f"a program that tried the walls got through: {detail}"))


@contextlib.contextmanager
def cannot_start(orders: socket.socket) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        orders.close()
        raise SandboxError(f"the sandbox's warden cannot be started: {error}") from error


def read_verdict(verdict: socket.socket) -> dict[str, Any] | None:
    """A judge's, once its cell has ended; None when it had none."""
    data = bytearray()
    while part := verdict.recv(READ_BYTES):
        data += part
    return json.loads(bytes(data[4:])) if len(data) > 4 else None


def verdict_of(program: Cell, judge: Cell, said: dict[str, Any] | None, seconds: float) -> Verdict:
    """Where the program has ended before its tests, how is the reason; else what the tests found. Tests that came to
    an end of their own before that were given answers that they could not take."""
    ended, judged = program.reason(), judge.reason()
    if said is None:
        why = ended if ended not in ("ok", "told") else "result"
        return Verdict(0, 1, why, f"its tests ended: {judged}", "", seconds)
    reason = said["why"] if said["failed"] else "passed"
    if reason == "gone":
        reason = {"ok": "exit", "error": "exit", "told": "result"}.get(ended, ended)
    return Verdict(said["passed"], said["failed"], reason, said["note"], said["broken"], seconds)


_shared: dict[int, Sandbox] = {}  # by process: a fork has none
_lock = threading.Lock()


def shared() -> Sandbox:
    """This process's sandbox, started when first asked for, and again should its warden have died. Raises
    SandboxError."""
    with _lock:
        sandbox = _shared.get(os.getpid())
        if sandbox is None or not sandbox.alive:
            _shared.clear()
            sandbox = _shared[os.getpid()] = Sandbox()
        return sandbox


def run_python(code: str, limits: Limits = DEFAULT) -> ToolResult:
    """Run a program in a cell of its own, without network, files or anything of this machine's, within `limits`.
    Blocks until it has ended. Raises SandboxError where it cannot be isolated."""
    return shared().run(code, limits)


@atexit.register
def _end() -> None:
    sandbox = _shared.pop(os.getpid(), None)
    if sandbox is not None:
        sandbox.close()

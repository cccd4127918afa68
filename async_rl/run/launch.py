"""What the launcher starts, and how: a process as a plan, how it is started on this machine, and how it ended.

`Pools` (pools.py) watches over processes wherever they are: whoever starts some is a `Starter`, and what it gives back
a `Handle`. Here is the one for this machine, whose processes the kernel tells when the launcher itself is killed (see
`process`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from async_rl.errors import AsyncRLError
from async_rl.run import killpoints
from async_rl.run.process import EXIT_AGAIN, HOUSE_PLACE, PARENT_VARIABLE, die_with_parent

LAST_LINE_BYTES = 8192  # how far back the last line of a log is looked for


class LaunchError(AsyncRLError):
    """The run failed; the message names the process, its last words and its log."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to be: `python -P -m module arguments…`, on `cpus` alone if there are any named; `python` is an
    interpreter (default: this one). When all those that `ends_run` (the first to exit, where none does) have exited
    with 0, the others have the grace to do the same. One that is `expendable` may fail while there are others like it.
    One that a signal killed, or that exits with EXIT_AGAIN, is started again, with `again` added to its arguments;
    None: never. `rank` of `world` processes that live and die together: rank 0 and the others find each other by the
    variables that torchrun sets."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    ends_run: bool = False
    cpus: tuple[int, ...] = ()
    expendable: bool = False
    again: tuple[str, ...] | None = None
    python: str = ""
    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code` as Popen has it, negative for a signal. `lost` says of one that did not end by itself
    what became of its machine."""

    name: str
    code: int
    last_line: str
    log: Path | None
    lost: str = ""

    @property
    def signal_name(self) -> str:
        return signal.Signals(-self.code).name

    @property
    def calls_for_another(self) -> bool:
        """Whether it may be started again: it was killed, or says so itself."""
        return self.code < 0 or self.code == EXIT_AGAIN

    @property
    def cause(self) -> str:
        """Of an exit that calls for another start: "was killed by SIGKILL"."""
        if self.lost:
            return f"was lost with its machine ({self.lost})"
        return f"was killed by {self.signal_name}" if self.code < 0 else f"could not go on ({self.last_line})"

    def __str__(self) -> str:
        how = f"killed by {self.signal_name}" if self.code < 0 else f"exit {self.code}"
        if self.lost:
            how = f"lost with its machine: {self.lost}"
        words = f": {self.last_line}" if self.last_line else ""
        return f"{self.name} failed ({how}){words}" + (f"; log: {self.log}" if self.log else "")


@dataclass(frozen=True)
class Outcome:
    """`failures` in the order in which they were seen; `interrupted` is the number of the signal that ended the
    run, 0 for none; `stuck` are those that had to be ended although the run was over; `lost` are the failures that the
    run survived, and `restarted` those after which a process was started again. `clean`: all that was interrupted ended
    with 0."""

    failures: tuple[Exit, ...] = ()
    interrupted: int = 0
    stuck: tuple[str, ...] = ()
    lost: tuple[Exit, ...] = ()
    clean: bool = False
    restarted: tuple[Exit, ...] = ()

    @property
    def code(self) -> int:
        if self.interrupted:
            return 128 + self.interrupted
        return 1 if self.failures or self.stuck else 0

    def message(self, grace: float) -> str:
        """What went wrong, empty when nothing did."""
        if self.failures:
            return "\n".join(str(failure) for failure in self.failures)
        if self.stuck:
            return f"{', '.join(self.stuck)} did not end within {grace:g} s of the end of the run; ended by force"
        return ""


class Handle(Protocol):
    """A process that was started, or is about to be. None of these raises."""

    lost: str
    """Once `poll` has said that it ended: what became of its machine, if that is why; else empty."""

    def poll(self) -> int | None:
        """Its exit code as Popen has it, once it has ended, its log is whole and nothing that it started is left; None
        before. Does not wait."""

    def send_signal(self, number: int) -> None:
        """To the process alone; for one that has not begun it is the end. Does not wait."""

    def kill(self, patience: float) -> None:
        """It and all that it started, at once; waits `patience` seconds at most for the process to be gone."""


class Starter(Protocol):
    def start(self, spec: ProcessSpec, log: Path | None, again: bool) -> Handle:
        """What the process says is appended to `log`, or shown on the terminal. Does not wait."""


class LocalStarter:
    """Starts processes on this machine. To be used from a thread that lives as long as they shall: the kernel ends
    children with the thread that started them."""

    def start(self, spec: ProcessSpec, log: Path | None, again: bool) -> LocalHandle:
        return LocalHandle(spawn(spec, log, again))


class LocalHandle:
    lost = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        running = self._process.returncode is None
        code = self._process.poll()
        if running and code is not None:
            kill_group(self._process.pid)  # what such a process left in its group
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self, patience: float) -> None:
        if self._process.returncode is None:
            kill_group(self._process.pid)
            with suppress(subprocess.TimeoutExpired):  # one that its disk holds cannot even be killed
                self._process.wait(patience)


def spawn(
    spec: ProcessSpec, log: Path | None, again: bool, also: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A child of this process, which leads a group of its own and ends with the thread that this was called from; its
    environment is `child_environment`, and what `also` has. Raises OSError."""
    environment = child_environment(spec.python) | dict(also or {})
    if again:
        environment.pop(killpoints.VARIABLE, None)  # a test's: it has had its death
    output: IO[bytes] | None = log.open("ab") if log else None
    parent = os.getpid()
    try:
        return subprocess.Popen(
            [
                spec.python or sys.executable,
                "-P",
                "-m",
                spec.module,
                *spec.arguments,
                *((spec.again or ()) if again else ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: _before_exec(parent, spec.cpus),
        )
    finally:
        if output:
            output.close()


def child_environment(python: str = "") -> dict[str, str]:
    """One thread each unless the user says otherwise: several processes' OpenMP pools on the same cores spin against
    each other (measured: 17 times slower). For `python`, an interpreter of another environment, that environment's
    programs come first, and a checkout of async-rl is importable; a place where other packages lie too would hide
    those of that environment, which then needs async-rl of its own."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }
    if python:
        _prepend(environment, "PATH", str(Path(python).parent))
        if HOUSE_PLACE.name not in ("site-packages", "dist-packages"):
            _prepend(environment, "PYTHONPATH", str(HOUSE_PLACE))
    return environment


def _prepend(environment: dict[str, str], variable: str, folder: str) -> None:
    others = environment.get(variable)
    environment[variable] = folder + os.pathsep + others if others else folder


def _before_exec(parent: int, cpus: Sequence[int]) -> None:
    """In the child: so that not even a process that is still importing outlives a killed launcher. Signals that the
    parent's thread blocks (Ray's do) are the child's to get."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(parent)
    if cpus:
        os.sched_setaffinity(0, cpus)


def note(logs: Path, words: str) -> None:
    """In the launcher's log, for whoever asks later how the run went."""
    add_line(logs / "launcher.log", words)


def add_line(log: Path | None, words: str) -> None:
    """Something about a process, in its log, or on the terminal."""
    if log is None:
        print(words, file=sys.stderr, flush=True)
        return
    with log.open("a", encoding="utf-8") as file:
        file.write(words + "\n")


def last_line(log: Path) -> str:
    """The last line of a log that says anything, without the word "error: " that begins it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("error: ") if said else ""


def kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)

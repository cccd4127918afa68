"""The local launcher: starts a run's processes, watches them, and takes them all down together.

A run ends by itself: the trainer finishes, tells the buffer, the buffer tells the nodes and the store, and all exit
with 0. Anything else is a failure of the whole run: the first process that exits with another code, or one that does
not end when the others have, brings the rest down (SIGTERM, a grace, SIGKILL to its process group), and the outcome
says which it was and why. An inference node is expendable: a run goes on without it until the last of them fails.
When the launcher itself is killed, the kernel tells its children (see `process`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from async_rl.errors import AsyncRLError
from async_rl.run import killpoints
from async_rl.run.process import EXIT_AGAIN, HOUSE_PLACE, PARENT_VARIABLE, TERMINATED_EXIT, die_with_parent

POLL = 0.1  # seconds between looks at the processes
SETTLE = 1.5  # seconds after the first failure in which others may still tell theirs
LAST_LINE_BYTES = 8192  # how far back the last line of a log is looked for


class LaunchError(AsyncRLError):
    """The run failed; the message names the process, its last words and its log."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to be: `python -P -m module arguments…`, on `cpus` alone if there are any named; `python` is an
    interpreter (default: this one). When all those that `ends_run` (the first to exit, where none does) have exited
    with 0, the others have the grace to do the same. One that is `expendable` may fail while there are others like it.
    One that a signal killed, or that exits with EXIT_AGAIN, is started again, with `again` added to its arguments;
    None: never."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    ends_run: bool = False
    cpus: tuple[int, ...] = ()
    expendable: bool = False
    again: tuple[str, ...] | None = None
    python: str = ""


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code` as Popen has it, negative for a signal."""

    name: str
    code: int
    last_line: str
    log: Path | None

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
        return f"was killed by {self.signal_name}" if self.code < 0 else f"could not go on ({self.last_line})"

    def __str__(self) -> str:
        how = f"killed by {self.signal_name}" if self.code < 0 else f"exit {self.code}"
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


class Pools:
    """Processes that live and die together: a context manager that starts them and leaves none behind.

    Output goes to `logs`/<name>.log, or to the terminal when `logs` is None. While it is open, SIGINT, SIGTERM and
    SIGHUP only take note; `supervise` acts on them. A second one ends the grace. A process that a signal killed, or
    that asks for it by EXIT_AGAIN, is started again, `restarts` times at most; any other failure has a reason that
    would be there again, and ends the run."""

    def __init__(self, specs: Sequence[ProcessSpec], logs: Path | None, grace: float, restarts: int = 0) -> None:
        self.specs = specs
        self.logs = logs
        self.grace = grace
        self.restarts = restarts
        self._restarted: list[Exit] = []
        self._ending = False
        self._told: set[str] = set()  # to end, as they did not hear that the run is over
        self.signals: list[int] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._exits: dict[str, Exit] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Pools:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._note)
        try:
            for spec in self.specs:
                self._processes[spec.name] = self._start(spec)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def supervise(self, tick: Callable[[], None] = lambda: None) -> Outcome:
        """Until the run is over, failed or interrupted; then every process is gone. `tick` is called all the time."""
        over_since = None
        while True:
            self._look()
            if self.signals:
                self.end_all()
                return Outcome(interrupted=self.signals[0], clean=not self._failures())
            if self._has_failed():
                return self._end_failed(tick)
            if len(self._exits) == len(self.specs):
                tick()
                return Outcome(lost=tuple(self._failures()), restarted=tuple(self._restarted))
            if self._is_over():
                over_since = over_since or time.monotonic()
                self._end_latecomers(time.monotonic() - over_since)
                if time.monotonic() - over_since > self.grace:
                    stuck = tuple(spec.name for spec in self.specs if spec.name not in self._exits)
                    self.end_all()
                    return Outcome(stuck=stuck)
            tick()
            time.sleep(POLL)

    def end_all(self) -> None:
        """Returns when all are gone: SIGTERM to those that end the run, which then may tell the others; SIGTERM to
        all that are left; SIGKILL. A grace for each, cut short by another signal to the launcher."""
        self._ending = True
        heard = max(1, len(self.signals))
        leaders = [spec.name for spec in self.specs if spec.ends_run and self._lives(spec.name)]
        if leaders:
            self._signal(leaders, signal.SIGTERM)
            self._wait(heard, lambda: all(self._ended_well(name) or self._lives(name) for name in leaders))
        self._signal(list(self._processes), signal.SIGTERM)
        self._wait(heard)
        self._kill_all()

    def _wait(self, heard: int, going_well: Callable[[], bool] = lambda: True) -> None:
        """Until all are gone, the grace is over, a signal more than `heard` came, or it does not go well."""
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline and len(self.signals) <= heard:
            self._look()
            if len(self._exits) == len(self._processes) or not going_well():
                return
            time.sleep(POLL / 2)

    def _lives(self, name: str) -> bool:
        return name in self._processes and name not in self._exits

    def _ended_well(self, name: str) -> bool:
        return name in self._exits and self._exits[name].code == 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)

    def _start(self, spec: ProcessSpec, again: bool = False) -> subprocess.Popen[bytes]:
        environment = child_environment(spec.python)
        if again:
            environment.pop(killpoints.VARIABLE, None)  # a test's: it has had its death
        output: IO[bytes] | None = self._log(spec.name).open("ab") if self.logs else None
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

    def _log(self, name: str) -> Path:
        assert self.logs is not None
        return self.logs / f"{name}.log"

    def _look(self) -> None:
        """Note who has exited, and end what such a process left in its group."""
        for name, process in self._processes.items():
            if name in self._exits:
                continue
            code = process.poll()
            if code is not None:
                _kill_group(process.pid)
                log = self._log(name) if self.logs else None
                if name in self._told and code in (TERMINATED_EXIT, -signal.SIGTERM):
                    code = 0
                self._exits[name] = Exit(name, code, last_line(log) if log else "", log)
        if not self._ending and not self.signals:
            self._start_again()

    def _start_again(self) -> None:
        """Those that call for it, while the run goes on."""
        for spec in self.specs:
            ended = self._exits.get(spec.name)
            if ended is None or not ended.calls_for_another or spec.again is None or self._is_over():
                continue
            if sum(each.name == spec.name for each in self._restarted) < self.restarts:
                self._restarted.append(ended)
                self._say(f"{spec.name} {ended.cause} and is started again")
                del self._exits[spec.name]
                self._processes[spec.name] = self._start(spec, again=True)

    def _end_latecomers(self, over_s: float) -> None:
        """The run is over. When only processes that were started again are left, they may wait for the others yet; and
        after half of the grace an expendable one may have been too late to hear: an engine starts for a minute."""
        left = {spec.name for spec in self.specs if spec.name not in self._exits}
        if over_s > self.grace / 2 and not self._told:
            self._told = left & {spec.name for spec in self.specs if spec.expendable}
            self._signal(sorted(self._told), signal.SIGTERM)
        if left and left <= {ended.name for ended in self._restarted}:
            self._ending = True
            self._signal(sorted(left), signal.SIGTERM)
            self._wait(max(1, len(self.signals)))
            self._kill_all()
            for name in left:
                self._exits[name] = Exit(name, 0, "", None)

    def _say(self, words: str) -> None:
        """In the launcher's own log, or to whoever looks at the terminal."""
        if self.logs is None:
            print(words, file=sys.stderr, flush=True)
        else:
            note(self.logs, words)

    def _failures(self) -> list[Exit]:
        return [ended for ended in self._exits.values() if ended.code != 0]

    def _has_failed(self) -> bool:
        """Whether somebody failed without whom the run cannot go on: an expendable process only when it was the last.
        Where the last one ended well, it was drained, or the run is about to end."""
        expendable = {spec.name for spec in self.specs if spec.expendable}
        if any(failure.name not in expendable for failure in self._failures()):
            return True
        gone = [ended for name, ended in self._exits.items() if name in expendable]
        return bool(gone) and len(gone) == len(expendable) and gone[-1].code != 0 and not self._is_over()

    def _is_over(self) -> bool:
        enders = [spec.name for spec in self.specs if spec.ends_run] or list(self._exits)[:1]
        return bool(enders) and all(self._ended_well(name) for name in enders)

    def _end_failed(self, tick: Callable[[], None]) -> Outcome:
        deadline = time.monotonic() + SETTLE
        while len(self._exits) < len(self._processes) and time.monotonic() < deadline and not self.signals:
            tick()
            time.sleep(POLL)
            self._look()
        failures = tuple(self._failures())
        self.end_all()
        return Outcome(failures)

    def _signal(self, names: Sequence[str], number: int) -> None:
        for name in names:
            if self._lives(name):
                self._processes[name].send_signal(number)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                _kill_group(process.pid)
                with suppress(subprocess.TimeoutExpired):  # one that its disk holds cannot even be killed
                    process.wait(self.grace)
        self._look()

    def _close(self) -> None:
        if len(self._exits) < len(self._processes):
            self.end_all()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _before_exec(parent: int, cpus: Sequence[int]) -> None:
    """In the child: so that not even a process that is still importing outlives a killed launcher."""
    die_with_parent(parent)
    if cpus:
        os.sched_setaffinity(0, cpus)


def note(logs: Path, words: str) -> None:
    """In the launcher's log, for whoever asks later how the run went."""
    with (logs / "launcher.log").open("a", encoding="utf-8") as log:
        log.write(words + "\n")


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


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)

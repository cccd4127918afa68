"""The launcher's watch over a run's processes: it starts them, looks after them, and takes them all down together.

A run ends by itself: the trainer finishes, tells the buffer, the buffer tells the nodes and the store, and all exit
with 0. Anything else is a failure of the whole run: the first process that exits with another code, or one that does
not end when the others have, brings the rest down (SIGTERM, a grace, SIGKILL to its process group), and the outcome
says which it was and why. An inference node is expendable: a run goes on without it until the last of them fails.
Expendable processes may also be added and dismissed while the run goes on.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from async_rl.run.gang import Gang
from async_rl.run.launch import Exit, Handle, LocalStarter, Outcome, ProcessSpec, Starter, last_line, note
from async_rl.run.process import TERMINATED_EXIT

POLL = 0.1  # seconds between looks at the processes
SETTLE = 1.5  # seconds after the first failure in which others may still tell theirs
LEAVING = 5.0  # seconds, beyond the grace, that a dismissed process has before it is ended by force


class Pools:
    """Processes that live and die together: a context manager that starts them and leaves none behind.

    Output goes to `logs`/<name>.log, or to the terminal when `logs` is None. While it is open, SIGINT, SIGTERM and
    SIGHUP only take note; `supervise` acts on them. A second one ends the grace. A process that a signal killed, or
    that asks for it by EXIT_AGAIN, is started again, `restarts` times at most; one that was lost with its machine
    always, as it was not its doing. Any other failure has a reason that would be there again, and ends the run."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        logs: Path | None,
        grace: float,
        restarts: int = 0,
        starter: Starter | None = None,
    ) -> None:
        self.specs = list(specs)
        self.logs = logs
        self.grace = grace
        self.restarts = restarts
        self.signals: list[int] = []
        self._starter: Starter = starter or LocalStarter()
        self._restarted: list[Exit] = []
        self._ending = False
        self._told: set[str] = set()  # to end, while others go on or did not hear that the run is over
        self._leaving: dict[str, float] = {}  # dismissed ones, and until when they may take
        self._processes: dict[str, Handle] = {}
        self._exits: dict[str, Exit] = {}
        self._handlers: dict[int, Any] = {}
        self._gang = Gang([spec.name for spec in self.specs if spec.world > 1])

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

    # --- while it goes on --------------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether processes may still be added and dismissed: nobody has ended the run."""
        return self._goes_on and not self._is_over()

    def present(self) -> list[str]:
        """The expendable processes that live and were not dismissed, in the order in which they were added."""
        return [spec.name for spec in self.specs if spec.expendable and self._stays(spec.name)]

    def add(self, spec: ProcessSpec) -> None:
        """One more; its name was never there before."""
        self.specs.append(spec)
        self._processes[spec.name] = self._start(spec)
        self._say(f"{spec.name} is added")

    def dismiss(self, name: str) -> None:
        """An expendable process ends in good order, within the grace, and is not started again. Does not wait."""
        self._told.add(name)
        self._leaving[name] = time.monotonic() + self.grace + LEAVING
        self._signal([name], signal.SIGTERM)
        self._say(f"{name} is dismissed")

    def _forget_dismissed(self) -> None:
        """What has left is no part of the run any more; what takes too long is ended."""
        for name, deadline in list(self._leaving.items()):
            ended = self._exits.get(name)
            if ended is None:
                if time.monotonic() > deadline:
                    self._say(f"{name} was dismissed and did not end within {self.grace:g} s: killed")
                    self._processes[name].kill(LEAVING)
                continue
            if ended.code != 0:
                self._say(f"{ended} (it was dismissed)")
            del self._leaving[name], self._exits[name], self._processes[name]
            self.specs = [spec for spec in self.specs if spec.name != name]

    @property
    def _goes_on(self) -> bool:
        return not self._ending and not self.signals

    # --- its end -----------------------------------------------------------------------------------------------------

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

    def _stays(self, name: str) -> bool:
        return self._lives(name) and name not in self._told

    def _ended_well(self, name: str) -> bool:
        return name in self._exits and self._exits[name].code == 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)

    def _start(self, spec: ProcessSpec, again: bool = False) -> Handle:
        return self._starter.start(spec, self._log(spec.name), again)

    def _log(self, name: str) -> Path | None:
        return self.logs / f"{name}.log" if self.logs else None

    def _look(self) -> None:
        """Note who has exited."""
        for name, process in self._processes.items():
            if name in self._exits or name in self._gang.fallen:
                continue
            code = process.poll()
            if code is not None:
                log = self._log(name)
                if name in self._told and code in (TERMINATED_EXIT, -signal.SIGTERM):
                    code = 0
                ended = Exit(name, code, last_line(log) if log else "", log, process.lost)
                if name in self._gang.names and code != 0 and self._goes_on:
                    self._gang.fell(ended, time.monotonic())
                else:
                    self._exits[name] = ended
        if self._goes_on:
            self._forget_dismissed()
            self._start_again()
            self._judge_gang()
        else:
            self._exits |= self._gang.fallen
            self._gang.fallen.clear()

    def _start_again(self) -> None:
        """Those that call for it, while the run goes on."""
        for spec in self.specs:
            ended = self._exits.get(spec.name)
            if ended is None or spec.name in self._gang.names:
                continue
            if not ended.calls_for_another or spec.again is None or self._is_over():
                continue
            if ended.lost or self._times_restarted(spec.name) < self.restarts:
                self._restarted.append(ended)
                self._say(f"{spec.name} {ended.cause} and is started again")
                del self._exits[spec.name]
                self._processes[spec.name] = self._start(spec, again=True)

    def _judge_gang(self) -> None:
        """Once a rank has ended that should not have: the end of all of them, and another start if that may help."""
        gang = self._gang
        left = [name for name in gang.names if self._lives(name) and name not in gang.fallen]
        if not gang.is_settled(time.monotonic(), left):
            return
        for name in left:
            self._processes[name].kill(LEAVING)
        cause, specs = gang.cause(), [spec for spec in self.specs if spec.name in gang.names]
        may = cause is not None and (cause.lost or sum(map(self._times_restarted, gang.names)) < self.restarts)
        if cause is not None and may and not self._is_over() and all(spec.again is not None for spec in specs):
            self._restarted.append(cause)
            self._say(f"{cause.name} {cause.cause}: all {len(specs)} ranks are started again")
            for spec in specs:
                self._exits.pop(spec.name, None)
                self._processes[spec.name] = self._start(spec, again=True)
        else:
            self._exits |= gang.fallen | {name: Exit(name, 0, "", None) for name in left}  # these did nothing wrong
        gang.fallen.clear()

    def _times_restarted(self, name: str) -> int:
        return sum(each.name == name and not each.lost for each in self._restarted)

    def _end_latecomers(self, over_s: float) -> None:
        """The run is over. When only processes that were started again are left, they may wait for the others yet; and
        after half of the grace an expendable one may have been too late to hear: an engine starts for a minute."""
        left = {spec.name for spec in self.specs if spec.name not in self._exits}
        late = left & {spec.name for spec in self.specs if spec.expendable} - self._told
        if over_s > self.grace / 2 and late:
            self._told |= late
            self._signal(sorted(late), signal.SIGTERM)
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
        for name, process in self._processes.items():
            if name not in self._exits:
                process.kill(self.grace)
        self._look()

    def _close(self) -> None:
        if len(self._exits) < len(self._processes):
            self.end_all()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

"""How fast a process grows: its memory, sampled over the steps of a run, and the slope of that with its uncertainty."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import real_runs

BLOCKS = 20
T_95 = 1.734  # one-sided, Student's t with BLOCKS - 2 degrees of freedom


def slope_bound(steps: Sequence[int], bytes_: Sequence[int]) -> tuple[float, float]:
    """Bytes a step: the least-squares slope, and its one-sided 95 % upper bound. Memory moves in plateaus, so samples
    next to each other say the same; BLOCKS means of consecutive ones are what the line is fitted to."""
    size = len(steps) // BLOCKS
    if size == 0:
        raise ValueError(f"{len(steps)} samples are fewer than {BLOCKS} blocks")
    parts = [slice(i * size, (i + 1) * size) for i in range(BLOCKS)]
    x = [statistics.fmean(steps[part]) for part in parts]
    y = [statistics.fmean(bytes_[part]) for part in parts]
    line = statistics.linear_regression(x, y)
    residuals = [value - line.intercept - line.slope * at for at, value in zip(x, y, strict=True)]
    spread = sum((at - statistics.fmean(x)) ** 2 for at in x)
    error = (sum(residual**2 for residual in residuals) / (BLOCKS - 2) / spread) ** 0.5
    return line.slope, line.slope + T_95 * error


class Watched:
    """RSS of every process of a run by its name, once a step, from metrics.jsonl."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lines = 0
        self._offset = 0
        self._processes: dict[int, tuple[str, psutil.Process]] = {}
        self.samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.step = 0

    def follow(self, alive: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while alive():
            assert time.monotonic() < deadline, f"step {self.step} after {timeout_s} s"
            if self._advance():
                self._sample()
            time.sleep(0.02)

    def _advance(self) -> bool:
        path = self._run / "metrics.jsonl"
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        before, self.step = self.step, self.step + whole.count(b'"reward":') - whole.count(b'"eval":')
        return self.step > before

    def _sample(self) -> None:
        if len(self._processes) < 5:
            for process in real_runs.processes_of(self._run):
                command = process.cmdline()
                if "--name" in command:
                    self._processes[process.pid] = (command[command.index("--name") + 1], process)
        for name, process in self._processes.values():
            try:
                self.samples[name].append((self.step, process.memory_info().rss))
            except psutil.NoSuchProcess:
                continue

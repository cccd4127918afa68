"""How long a run stands still when one of its processes is killed: from `kill -9` to the next trained step.

    python docs/recovery/measure.py            # about ten minutes; writes recovery.json and recovery.md beside it

One run of the small task of the tests with real processes under the launcher, which starts again what was killed. Each
process dies ten times, in turn, when the run has trained some steps since the last death.
"""

from __future__ import annotations

import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

from real_runs import SMALL, processes_of  # noqa: E402

from async_rl.run.metrics import MetricsTail  # noqa: E402

POOLS = {"buffer": "buffer.service", "store": "buffer.store", "trainer": "trainer.learner", "node-0": "inference.node"}
DEATHS = 10
STEPS_BETWEEN = 3  # trained since the last death
LIMIT_S = 120.0
OVERRIDES = {"run.steps": 100_000, "run.eval_every": 0, "trainer.checkpoint_every": 2, "launch.restarts": 1000}


class Steps:
    """The run's trained steps, as they are recorded."""

    def __init__(self, run: Path) -> None:
        self._tail = MetricsTail(run / "metrics.jsonl")
        self.intervals: list[float] = []
        self._last = 0.0
        self._newest = -1

    def wait(self, count: int, undisturbed: bool = True) -> float:
        """When the `count`-th step from now was seen, on the monotonic clock."""
        deadline, seen = time.monotonic() + LIMIT_S, 0
        while seen < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step for {LIMIT_S:.0f} s")
            for record in self._tail.read():
                if record.get("step", -1) > self._newest:  # a trainer that goes back makes the file anew
                    self._newest = record["step"]
                    now, seen = time.monotonic(), seen + 1
                    if undisturbed and self._last:
                        self.intervals.append(now - self._last)
                    self._last = now
            time.sleep(0.005)
        return self._last


def kill(run: Path, name: str) -> None:
    for process in processes_of(run):
        arguments = process.cmdline()
        if POOLS[name] in arguments and name in arguments:
            process.kill()
            return
    raise ProcessLookupError(f"{name} is not there")


def measure(run: Path) -> tuple[dict[str, list[float]], list[float]]:
    steps = Steps(run)
    times: dict[str, list[float]] = {name: [] for name in POOLS}
    steps.wait(5, undisturbed=False)
    for _ in range(DEATHS):
        for name in POOLS:
            steps.wait(STEPS_BETWEEN)
            died = time.monotonic()
            kill(run, name)
            times[name].append(steps.wait(1, undisturbed=False) - died)
            print(f"{name:8} {times[name][-1]:6.2f} s", flush=True)
            steps.wait(1, undisturbed=False)
    return times, steps.intervals


@contextmanager
def launched(folder: Path) -> Iterator[Path]:
    config, run = folder / "small.toml", folder / "run"
    config.write_text(SMALL)
    settings = [word for key, value in OVERRIDES.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-P", "-m", "async_rl.run.cli", "run", str(config), "--out", str(run), *settings]
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def page(result: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} |" for name, times in result["seconds"].items()
    ]
    return (
        f"""# From `kill -9` to the next trained step

Made by `python docs/recovery/measure.py` on {result["machine"]}, from [recovery.json](recovery.json):
{DEATHS} deaths of each process in one run, seconds. Undisturbed, a step took {result["step_s"]:.2f} s (median).
Heartbeat 0.5 s; a checkpoint every second step.

| killed | median | worst of {DEATHS} |
|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder)) as run:
        times, intervals = measure(run)
    result = {
        "machine": f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "step_s": statistics.median(intervals),
        "seconds": times,
    }
    (HERE / "recovery.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "recovery.md").write_text(page(result))


if __name__ == "__main__":
    main()

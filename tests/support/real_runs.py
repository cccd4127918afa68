"""Real runs for the end-to-end tests: the command line in subprocesses, on a small config over the quickstart task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SMALL = """
[run]
name = "small"
steps = 6
eval_every = 3
eval_samples = 32

[model.tiny]
seed = 0
accuracy_low = 0.25
accuracy_high = 0.3

[task]
kind = "digit_sort"
digits = 8

[buffer]
max_staleness = 4
groups_per_step = 4
group_size = 8
heartbeat = 0.5

[inference]
nodes = 2
slots = 32
max_new_tokens = 12
max_context = 24

[trainer]
learning_rate = 2e-3
checkpoint_every = 2

[algorithm]
ratio_level = "token"
treatment = "clip"
ratio_low = 0.8
ratio_high = 1.28
surrogate = "ppo"

[algorithm.alarms]
action = "warn"  # so few answers a step teach nothing for long, and that is not what is tested with them
"""


GRACE_S = 20.0


def own_task(shell: Shell, name: str, task: str) -> Path:
    """The config of the small run with another [task], on the base model of the small run."""
    making = [sys.executable, "-P", "-m", "trainer.tiny_model", "--config", str(shell.config)]
    base = subprocess.run(making, capture_output=True, text=True, check=True, timeout=500).stdout.splitlines()[-1]
    small = SMALL
    for old, new in (("[model.tiny]", f'[model]\npath = "{base}"'), ("seed = 0\naccuracy_low = 0.25\n", ""),
                     ("accuracy_high = 0.3\n", ""), ('[task]\nkind = "digit_sort"\ndigits = 8\n', task)):  # fmt: skip
        assert old in small
        small = small.replace(old, new, 1)
    path = shell.folder / name
    path.write_text(small)
    return path


class Shell:
    """Starts `async-rl` commands in a directory of their own and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "small.toml"
        self.config.write_text(SMALL)
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "async_rl.run.cli", *arguments],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"} | environment, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, *arguments: str, timeout: float = 400.0, **environment: str) -> tuple[int, str]:
        """Exit code and everything printed."""
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def close(self) -> None:
        """Ctrl-C first, so that sockets and files are taken away; what does not heed it is killed."""
        running = [process for process in self._started if process.poll() is None]
        for process in running:
            interrupt(process)
        deadline = time.monotonic() + GRACE_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait()


def records(run: Path) -> list[dict[str, Any]]:
    """The training steps of a run's metrics."""
    whole, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")  # the last line may be half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if "reward" in line]


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)


def processes_of(run: Path) -> list[psutil.Process]:
    """Every process on this machine that was started for a run directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments: Sequence[str] = process.info["cmdline"] or ()
        if str(run) in arguments and process.pid != os.getpid():
            found.append(process)
    return found


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def kill_everything(process: subprocess.Popen[str]) -> None:
    """kill -9 for the launcher and every process of the run, at once."""
    family = psutil.Process(process.pid).children(recursive=True)
    for each in (psutil.Process(process.pid), *family):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGSTOP)  # so that none acts on the death of another
    for each in (psutil.Process(process.pid), *family):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(30)
    psutil.wait_procs(family, 30)

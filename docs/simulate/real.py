"""Real runs to hold a forecast against: `async-rl run` in processes, capped nodes on cores of their own.

Shared by validate.py and ../plan/brute_force.py. A run directory that is complete is not made again.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer.fit import read_run

OTHERS = "others.json"  # in a run directory: how disturbed the run was; written last

BASE: dict[str, Any] = {
    "run.eval_every": 0,
    "launch.pin": True,  # the pools must not take turns on the same cores
    "buffer.groups_per_step": 16,
    "inference.slots": 64,
    "inference.max_tokens_per_second": 640,
    "trainer.micro_batch_tokens": 16,  # one answer at a time: a trainer about as slow as two or three such nodes
}
"""What all runs have in common, over configs/quickstart.toml."""


def settings(changes: Mapping[str, Any]) -> list[str]:
    """BASE with changes, as options of the command line."""
    return [part for key, value in {**BASE, **changes}.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def is_done(directory: Path) -> bool:
    return (directory / OTHERS).exists()


def real_run(directory: Path, changes: Mapping[str, Any]) -> None:
    """Raises CalledProcessError when it fails. Notes how many cores other processes kept busy meanwhile: a trainer that
    shares its core runs at another speed, which no forecast can know."""
    command = [sys.executable, "-P", "-m", "async_rl.run.cli", "run", "quickstart", "--out", str(directory)]
    started, busy, own = time.monotonic(), machine_seconds(), own_seconds()
    subprocess.run([*command, *settings(changes)], check=True, stdout=subprocess.DEVNULL)
    others = (machine_seconds() - busy - (own_seconds() - own)) / (time.monotonic() - started)
    (directory / OTHERS).write_text(json.dumps(round(max(0.0, others), 3)) + "\n")


def machine_seconds() -> float:
    """CPU seconds that were not idle, since the machine started (Linux)."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process's children that have ended, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(directory: Path) -> dict[str, float]:
    """Steps/s and mean staleness after the first steps, and what else says how the run went (`others_cores`: the cores
    that other processes kept busy)."""
    run = read_run(directory)
    summary = json.loads((directory / "summary.json").read_text())
    return {
        "steps_per_s": run.steps_per_s,
        "staleness": run.staleness,
        "nodes_idle": summary["idle_fraction"]["inference"],
        "trainer_idle": run.trainer_idle,
        "wall_seconds": summary["wall_seconds"],
        "others_cores": json.loads((directory / OTHERS).read_text()),
    }


def forecast(module: str, changes: Mapping[str, Any], source: Path, result: Path, *options: str) -> Any:
    """What a command (buffer.forecast, buffer.plan) says from a run; its --json."""
    command = [sys.executable, "-P", "-m", module, "quickstart", "--from", str(source), "--json", str(result)]
    subprocess.run([*command, *settings(changes), *options], check=True, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())

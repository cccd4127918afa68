"""Whole runs whose trainer is several processes: finding its ranks, and what must hold of each that ended well."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import real_runs


def check_finished(run: Path, steps: int) -> None:
    """What must hold of every run that ended well."""
    summary = real_runs.summary(run)
    ledger = summary["ledger"]
    assert summary["steps"] == steps
    assert ledger["leased"] + ledger["ready"] + ledger["batched"] == 0
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert left_of(run) == []


def left_of(run: Path) -> list[int]:
    """Processes of a run, its ranks included: each names the run's directory, or logs into it."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = process.info["cmdline"] or ()
        if str(run) in line or ("trainer.ranks.follower" in line and _logs_into(process, run)):
            found.append(process.info["pid"])
    return found


def rank_of(run: Path, rank: int) -> psutil.Process:
    """The process that is this rank of the run's trainer."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or ()
        if f"trainer-rank{rank}" in line and _logs_into(process, run):
            return process
    raise AssertionError(f"no rank {rank}")


def _logs_into(process: psutil.Process, run: Path) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(run))
    except OSError:
        return False


def versions(run: Path) -> int:
    return len(real_runs.records(run)) if (run / "metrics.jsonl").exists() else 0

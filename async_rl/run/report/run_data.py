"""Reads a run's directory for its report: whatever is there, at any time of the run's life."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from async_rl.config import BufferConfig, Config, RunConfig
from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.metrics import Record, eval_sets_of, read_metrics, steps_of
from async_rl.run.summary import build_summary
from async_rl.wire.messages import NodeStatus, Status

State = Literal["finished", "running", "stopped"]


@dataclass(frozen=True)
class RunData:
    """A run as far as it has come. `config` is its config.toml with the defaults filled in, as plain values: a report
    of an older run must not fail for a key that has gone since. `summary` has the keys of summary.json, taken from the
    records when the run has not written it. `eval_sets` has the evaluations by set, `evals` those of the first.
    `pools` are the lines of the buffer's view, in order of their time."""

    path: Path
    config: dict[str, Any]
    steps: list[Record]
    evals: list[Record]
    eval_sets: dict[str, list[Record]]
    pools: list[Record]
    samples: list[Record]
    summary: Record
    state: State
    seconds: float

    @property
    def name(self) -> str:
        return str(self.config["run"]["name"])

    @property
    def bound(self) -> int:
        return int(self.config["buffer"]["max_staleness"])


def read_run(directory: RunDirectory) -> RunData:
    """Raises AsyncRLError when a file of the run is there and cannot be understood, or config.toml is missing."""
    config = _read_config(directory.config_path)
    records = read_metrics(directory.metrics_path)
    steps = steps_of(records)
    version = int(steps[-1]["version"]) if steps else 0
    # What was recorded after the checkpoint that a run went on from is no part of its history, until it is made again.
    # An evaluation of which every sample was cancelled has no reward.
    sets = {
        name: kept
        for name, items in eval_sets_of(records).items()
        if (kept := [item for item in items if int(item["version"]) <= version])
    }
    pools = pools_of(records)
    seconds = max((float(record.get("time_s") or 0) for record in (*steps, *pools)), default=0.0)
    summary = _read_summary(directory.summary_path, steps)
    state: State = "stopped"
    if summary is not None:
        state, seconds = "finished", float(summary.get("wall_seconds") or seconds)
    elif _is_held(directory):
        state = "running"
    return RunData(
        path=directory.path,
        config=config,
        steps=steps,
        evals=next(iter(sets.values()), []),
        eval_sets=sets,
        pools=pools,
        samples=read_metrics(directory.samples_path),
        summary=summary or summary_so_far(records, pools, config, seconds),
        state=state,
        seconds=seconds,
    )


def pools_of(records: Sequence[Record]) -> list[Record]:
    """The lines with the buffer's view, rising in time. After a resume the seconds since the checkpoint are there
    twice: the later counts."""
    lines: list[Record] = []
    for record in records:
        if "pools" in record:
            while lines and lines[-1]["time_s"] >= record["time_s"]:
                lines.pop()
            lines.append(record)
    return lines


def summary_so_far(
    records: Sequence[Record], pools: Sequence[Record], config: Mapping[str, Any], seconds: float
) -> Record:
    """What summary.json would hold if the run ended now."""
    run = RunConfig(name=config["run"]["name"], seed=config["run"]["seed"])
    known = Config(run=run, buffer=BufferConfig(max_staleness=config["buffer"]["max_staleness"]))
    return build_summary(records, _last_status(pools), known, seconds)


def _last_status(pools: Sequence[Record]) -> Status | None:
    if not pools:
        return None
    last = pools[-1]["pools"]
    nodes = [
        NodeStatus(
            name=node["name"],
            state=node["state"],
            engine="",
            slots=node["slots"],
            policy=None,
            leased_samples=node["leased"],
            busy_fraction=node["busy_s"] / node["alive_s"] if node["alive_s"] else 0.0,
            sampled_tokens=node["sampled_tokens"],
        )
        for node in last["nodes"]
    ]
    return Status(
        uptime_s=last["uptime_s"],
        nodes=tuple(nodes),
        trainer="",
        newest=None,
        confirmed_batches=last["confirmed"],
        steps=0,
        ledger=last["ledger"],
        eval_ledger={},
        outside={},
        ready_groups=last["ready_groups"],
        ready_bytes=last["ready_bytes"],
        reused=last.get("reused", {}),
        reserved_bytes=0,
        waiting=last["waiting"],
        push_ms=tuple(push for line in pools for push in line["pools"]["push_ms"]),
        bound=0,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AsyncRLError(f"{path} cannot be read: {error.strerror}: is this a run's directory?") from error
    except ValueError as error:
        raise AsyncRLError(f"{path} is not valid TOML: {error}") from error
    config = _merged(msgspec.to_builtins(Config()), table)
    run, buffer = config["run"], config["buffer"]
    numbers = {"run.seed": run["seed"], "run.steps": run["steps"], "buffer.max_staleness": buffer["max_staleness"]}
    for key, value in numbers.items():
        if not isinstance(value, int):
            raise AsyncRLError(f"{path}: {key} is {value!r}, and must be a whole number")
    return config


def _merged(defaults: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` over `defaults`. A section that is no table is left as its defaults."""
    merged = dict(defaults)
    for key, value in table.items():
        known = defaults.get(key)
        if isinstance(known, dict):
            merged[key] = _merged(known, value) if isinstance(value, Mapping) else known
        else:
            merged[key] = value
    return merged


def _read_summary(path: Path, steps: Sequence[Record]) -> Record | None:
    """None when there is none, or when it is of an earlier end than the steps recorded since."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AsyncRLError(
            f"{path} cannot be read: {error}: move it away and the report is made from the rest"
        ) from error
    if not isinstance(summary, dict) or int(summary.get("steps") or 0) < len(steps):
        return None
    return summary


def _is_held(directory: RunDirectory) -> bool:
    try:
        return directory.is_held()
    except OSError:  # a copy that may only be read
        return False

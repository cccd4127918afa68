"""`async-rl bench pipeline`: the whole loop, asynchronous against exactly synchronous (bound 0), the same processes.

Every arm is a real run of the config with another `buffer.max_staleness`, evaluation off, each pool on cores of its own
(launch.pin). Speed is steps per second between the warm-up and the last steps, in which nodes have nothing left to do.

What asynchrony could reach at best follows from the synchronous run of the same round. There a step is t_rollout (first
lease to last accepted result of its batch) and then t_train (batch received to version published); pools that never
wait for each other take max(t_rollout, t_train) a step, so the ideal speed-up is (t_rollout + t_train) / max.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from async_rl.config import load_config
from async_rl.errors import AsyncRLError
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, ratios, run_bench
from async_rl.run.launch import child_environment, last_line
from async_rl.run.metrics import Record, read_metrics, steps_of
from async_rl.run.process import PARENT_VARIABLE

WARM_UP = 6  # steps until the pipeline is full and every code path has run once
RUN_TIMEOUT_S = 900.0
SYNCHRONOUS = "bound 0"

METRICS = (
    Metric("steps_per_s", "steps/s", "higher"),
    Metric("rollout_s", "t_rollout s", "lower"),
    Metric("train_s", "t_train s", "lower"),
    Metric("inference_idle", "inference idle", "lower"),
    Metric("trainer_idle", "trainer idle", "lower"),
    Metric("staleness", "staleness", "lower"),
)


def steady(steps: Sequence[Record], bound: int) -> Sequence[Record]:
    """The steps that count: after the warm-up, and before the nodes have run out of tickets."""
    return steps[WARM_UP : len(steps) - bound - 1]


def measures_of(records: Sequence[Record], bound: int) -> Measures:
    """From a run's metrics: steps a second, means of a step's parts, and the share of time that each pool waited."""
    steps = steps_of(records)
    counted = steady(steps, bound)
    before = steps[WARM_UP - 1]
    seconds = counted[-1]["time_s"] - before["time_s"]
    return {
        "steps_per_s": len(counted) / seconds,
        "rollout_s": mean(step["rollout_s"] for step in counted),
        "train_s": mean(step["cycle_s"] for step in counted),
        "inference_idle": _inference_idle(records, before["time_s"], counted[-1]["time_s"]),
        "trainer_idle": sum(step["draw_wait_s"] for step in counted) / sum(step["step_s"] for step in counted),
        "staleness": mean(step["staleness_mean"] for step in counted),
    }


def _inference_idle(records: Sequence[Record], start: float, end: float) -> float:
    """Mean over the nodes of the share of time without work, from the first look at them in the span to the last."""
    looks = [record["pools"] for record in records if "pools" in record and start <= record["time_s"] <= end]
    if len(looks) < 2:
        raise AsyncRLError("the run was too short to see what its nodes did: raise --steps")
    first, last = ({node["name"]: node for node in look["nodes"]} for look in (looks[0], looks[-1]))
    shares = [
        (last[name]["busy_s"] - first[name]["busy_s"]) / max(1e-9, last[name]["alive_s"] - first[name]["alive_s"])
        for name in first.keys() & last.keys()
    ]
    return 1.0 - float(mean(shares))


def ideal_speedup(synchronous: Measures) -> float:
    """(t_rollout + t_train) / max of the two, of a bound-0 run."""
    rollout, train = synchronous["rollout_s"], synchronous["train_s"]
    return (rollout + train) / max(rollout, train)


def run_once(config: str, overrides: Sequence[str], bound: int) -> Measures:
    """One real run, to its end. Raises AsyncRLError with the run's own last words when it fails."""
    with tempfile.TemporaryDirectory(prefix="async-rl-bench-") as scratch:
        out, log = Path(scratch) / "run", Path(scratch) / "log"
        settings = [f"--set={text}" for text in (*overrides, f"buffer.max_staleness={bound}")]
        command = [sys.executable, "-P", "-m", "async_rl.run.cli", "run", config, "--out", str(out), *settings]
        environment = {key: value for key, value in child_environment().items() if key != PARENT_VARIABLE}
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as run:
            try:
                code = run.wait(RUN_TIMEOUT_S)
            except BaseException as error:
                run.terminate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise AsyncRLError(f"a run with bound {bound} took more than {RUN_TIMEOUT_S:g} s") from error
                raise
        if code:
            raise AsyncRLError(f"the run with bound {bound} failed: {last_line(log)}")
        return measures_of(read_metrics(out / "metrics.jsonl"), bound)


def bench(options: argparse.Namespace, console: Console) -> None:
    steps = options.steps if not options.quick else WARM_UP + max(options.bounds) + 12
    least = WARM_UP + max(options.bounds) + 4
    if steps < least:
        raise AsyncRLError(f"--steps {steps}: the warm-up and the largest bound need {least} or more")
    overrides = [
        f"run.steps={steps}", "run.eval_every=0", "trainer.checkpoint_every=0", "launch.pin=true", *options.overrides
    ]  # fmt: skip
    load_config(options.config, overrides)  # a mistake is reported before anything runs

    def arm(bound: int) -> Arm:
        return Arm(f"bound {bound}", lambda: run_once(options.config, overrides, bound))

    cell = Cell(f"{options.config}, {steps} steps", [arm(bound) for bound in (0, *options.bounds)], SYNCHRONOUS)
    settings = {"config": options.config, "overrides": overrides, "bounds": options.bounds}
    rounds = 1 if options.quick else options.rounds
    document = run_bench("pipeline", [cell], METRICS, rounds, settings, console)
    document["ideal"] = against_ideal(document["cells"][0])
    finish_bench(document, options, console)
    console.print(ideal_lines(document["ideal"]), highlight=False)


def against_ideal(cell: dict[str, Any]) -> dict[str, Any]:
    """Round by round: the ideal speed-up, and each bound's share of it."""
    base = cell["arms"][cell["baseline"]]
    rounds = len(base["steps_per_s"])
    ideal = [ideal_speedup({key: values[index] for key, values in base.items()}) for index in range(rounds)]
    shares = {}
    for arm in cell["arms"]:
        if arm != cell["baseline"]:
            speedups = ratios(cell, arm, METRICS[0]._asdict())
            shares[arm] = [speedup / best for speedup, best in zip(speedups, ideal, strict=True)]
    return {"speedup": ideal, "share": shares}


def ideal_lines(ideal: dict[str, Any]) -> str:
    """What the rounds come down to, in words."""
    best = ideal["speedup"]
    lines = [f"ideal speed-up over bound 0: {median(best):.3f} ({min(best):.3f}–{max(best):.3f})"]
    for arm, shares in ideal["share"].items():
        lines.append(f"{arm} reaches {median(shares):.3f} of it ({min(shares):.3f}–{max(shares):.3f})")
    return "\n".join(lines)


def _bounds(text: str) -> list[int]:
    try:
        bounds = [int(part) for part in text.split(",")]
    except ValueError:
        bounds = []
    if not bounds or min(bounds) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bounds above 0, for example 1,4")
    return bounds


def main() -> None:
    parser = bench_parser("pipeline", "The whole loop, asynchronous against lock-step, by real runs.", rounds=5)
    parser.add_argument("config", nargs="?", default="quickstart", metavar="CONFIG")
    parser.add_argument("--steps", type=int, default=40, help="of each run (%(default)s)")
    parser.add_argument("--bounds", type=_bounds, default=[1, 4], help="max_staleness of the other arms (1,4)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

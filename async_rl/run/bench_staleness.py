"""`async-rl bench staleness`: learning from data of an exact age, by lag, correction and learning rate, over seeds; and
by how often each batch is reused.

Every run starts from the config's base model and uses the real parts: the torch backend's steps, the torch engine's
samples and stamps, the task's verifier, the learner's check of a batch. Only the buffer is replaced, by a queue that
makes every token exactly as old as the lag says (trainer/bench_staleness_run.py). The rate is constant. A run's result
is the mean of its last three evaluations: greedy answers to held-out instances.

Each finished run is written to --json at once, and what that file already holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from async_rl.config import load_config
from async_rl.errors import AsyncRLError
from async_rl.run.bench import Metric, bench_main, bench_parser, finish_bench, machine, made_now, positive
from async_rl.run.bench_staleness_cells import Cell, Outcome, Scale, Task, overrides_of
from async_rl.run.bench_staleness_plan import CORRECTIONS, Grid, plan
from async_rl.run.bench_staleness_results import (
    ON_POLICY,
    Run,
    by_correction,
    final,
    lowest,
    on_policy,
    over_training,
    places,
    start,
)
from async_rl.run.launch import child_environment
from async_rl.run.pipes import Child

TRAINER = "trainer.bench_staleness_run"
RUN_TIMEOUT_S = 1800.0
START_S = 300.0  # for a process to import what it needs, on a busy machine
QUICK_SCALE = Scale(updates=4, groups=4, group_size=4, eval_every=2, eval_samples=16)
QUICK_GRID = Grid(lags=(2,), rates=(5e-4,), reuses=(), corrections=("sequence, truncated at 2",), seeds=(0,))

METRICS = (
    Metric("final", "held-out reward at the end", "higher"),
    Metric("over_training", "along the run", "higher"),
    Metric("lowest", "lowest evaluation", "higher"),
    Metric("start", "at the start", "higher"),
)


# --- the file --------------------------------------------------------------------------------------------------------


def document_of(runs: Sequence[Run], scale: Scale, seeds: int) -> dict[str, Any]:
    """The benchmark's document: `runs` as they came, and `cells` derived of them in the frame that all benchmarks
    share, of the first `seeds` seeds: what all of them have been run for. There the baseline is on-policy learning."""
    cells = []
    for place in places(runs):
        base = on_policy(runs, place.learning_rate)
        arms = {ON_POLICY: base, **by_correction(runs, place)}
        first = {name: [run for run in of if run["seed"] < seeds] for name, of in arms.items()}
        whole = {name: of for name, of in first.items() if len(of) == seeds}
        if ON_POLICY in whole and len(whole) > 1:
            measured = {name: _measures(of) for name, of in whole.items()}
            cells.append({"cell": place.name, "baseline": ON_POLICY, "arms": measured})
    return {
        "bench": "staleness",
        "made": made_now(),
        "machine": machine(),
        "settings": {"rounds": seeds, **msgspec.to_builtins(scale)},
        "metrics": [metric._asdict() for metric in METRICS],
        "cells": cells,
        "runs": list(runs),
    }


def _measures(runs: Sequence[Run]) -> dict[str, list[float]]:
    measures: dict[str, Callable[[Run], float]] = {
        "final": final, "over_training": over_training, "lowest": lowest, "start": start
    }  # fmt: skip
    return {name: [round(measure(run), 6) for run in runs] for name, measure in measures.items()}


def finished_runs(path: Path | None, scale: Scale) -> list[Run]:
    """What --json holds already. Raises AsyncRLError for a file of other runs: it would be lost."""
    if path is None or not path.exists():
        return []
    try:
        document = json.loads(path.read_text())
        held = {key: value for key, value in document["settings"].items() if key != "rounds"}
        runs: list[Run] = document["runs"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AsyncRLError(f"--json {path}: there is a file that this benchmark did not write: {error!r}") from error
    if held != (wanted := msgspec.to_builtins(scale)):
        raise AsyncRLError(f"--json {path} holds runs of another size, {held}; these would be {wanted}: name another")
    return runs


def seeds_held(path: Path | None) -> int:
    """Of how many seeds the cells of --json are, so that a run of fewer leaves them as they are; 0 without a file. Call
    after `finished_runs`."""
    return 0 if path is None or not path.exists() else int(json.loads(path.read_text())["settings"].get("rounds", 0))


def is_run(cell: Cell, runs: Sequence[Run]) -> bool:
    """Whether it was run with the same settings."""
    wanted = msgspec.to_builtins(cell)
    return any(all(run[key] == value for key, value in wanted.items()) for run in runs)


def without_outdated(runs: Sequence[Run]) -> list[Run]:
    """Without runs of corrections that have other settings, or none, by now."""
    return [run for run in runs if run["settings"] == CORRECTIONS.get(run["correction"])]


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all: an interruption loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


# --- the runs --------------------------------------------------------------------------------------------------------


class Runner:
    """Works off cells with `jobs` processes at a time, and hands each result to `finished` as it comes, in the caller's
    thread."""

    def __init__(self, scale: Scale, jobs: int) -> None:
        self._scale, self._jobs = scale, jobs

    def work_off(self, cells: Sequence[Cell], finished: Callable[[Cell, Outcome, float], None]) -> None:
        """Raises what the first failing process raised; the others end then."""
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        done: queue.SimpleQueue[tuple[Cell, Outcome, float] | Exception] = queue.SimpleQueue()
        stop = threading.Event()
        workers = [
            threading.Thread(target=self._serve, args=(waiting, done, stop), daemon=True)
            for _ in range(min(self._jobs, len(cells)))
        ]
        for worker in workers:
            worker.start()
        try:
            for _ in cells:
                result = done.get(timeout=RUN_TIMEOUT_S + START_S)
                if isinstance(result, Exception):
                    raise result
                finished(*result)
        finally:
            stop.set()

    def _serve(self, waiting: Any, done: Any, stop: threading.Event) -> None:
        try:
            with Child(TRAINER, [self._scale.config], child_environment()) as trainer:
                while not stop.is_set():
                    cell = waiting.get_nowait()
                    began = time.monotonic()
                    outcome = trainer.ask(Task(scale=self._scale, cell=cell), Outcome, RUN_TIMEOUT_S)
                    done.put((cell, outcome, time.monotonic() - began))
        except queue.Empty:
            return
        except Exception as error:  # whatever it is, who waits is to hear of it
            done.put(error)


# --- the command -----------------------------------------------------------------------------------------------------


def bench(options: argparse.Namespace, console: Console) -> None:
    scale, grid = scale_and_grid(options)
    cells = plan(grid)
    for cell in cells:
        load_config(scale.config, overrides_of(scale, cell))  # a mistake is reported before anything runs
    runs = without_outdated(finished_runs(options.json, scale))
    left = [cell for cell in cells if not is_run(cell, runs)]
    seeds = max(len(grid.seeds), seeds_held(options.json))

    def finished(cell: Cell, outcome: Outcome, seconds: float) -> None:
        runs.append({**msgspec.to_builtins(cell), **msgspec.to_builtins(outcome), "wall_s": round(seconds, 1)})
        if options.json is not None:
            write(options.json, document_of(runs, scale, seeds))
        console.print(f"{len(runs)}: {line(runs[-1])}", style="dim", highlight=False, soft_wrap=True)

    console.print(f"{len(left)} of {len(cells)} runs to do", style="dim", highlight=False)
    if left:
        Runner(scale, options.jobs).work_off(left, finished)
    finish_bench(document_of(runs, scale, seeds), options, console)


def line(run: Run) -> str:
    """A finished run, for whoever watches."""
    error = f", ended: {run['error']}" if run["error"] else ""
    return (
        f"lag {run['lag']}, reuse {run['reuse']}, {run['correction']}, {run['learning_rate']:g}, seed {run['seed']}: "
        f"{start(run):.3f} → {final(run):.3f}, {run['train_cpu_s'] + run['sample_cpu_s']:.0f} CPU s{error}"
    )


def scale_and_grid(options: argparse.Namespace) -> tuple[Scale, Grid]:
    if options.quick:
        return msgspec.structs.replace(QUICK_SCALE, config=options.config), QUICK_GRID
    scale = Scale(config=options.config, updates=options.updates)
    names = tuple(options.corrections or CORRECTIONS)
    return scale, Grid(options.lags, options.rates, options.reuses, names, tuple(range(options.rounds)))


def main() -> None:
    parser = bench_parser(
        "staleness", "Learning from old data: lag, correction and learning rate, over seeds.", rounds=3
    )
    grid = Grid()
    parser.add_argument("config", nargs="?", default="quickstart", metavar="CONFIG", help="whose model, task, trainer")
    parser.add_argument("--lags", type=_numbers(int, 1), default=grid.lags, help="in versions (16,4)")
    parser.add_argument(
        "--rates", type=_numbers(float, 0), default=grid.rates, help="the first with every lag (5e-4,…)"
    )
    parser.add_argument("--reuses", type=_numbers(int, 2), default=grid.reuses, help="of a batch, at lag 0 (2,4)")
    parser.add_argument(
        "--corrections", action="append", metavar="NAME", help="one of them; may be given several times"
    )
    parser.add_argument("--updates", type=positive, default=Scale().updates, help="of each run (%(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at the same time, a core each (%(default)s)")
    bench_main(bench, parser)


def _numbers(kind: Callable[[str], Any], least: float) -> Callable[[str], list[Any]]:
    def convert(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",") if part]
        except ValueError:
            values = []
        if any(value < least for value in values) or (text and not values):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least {least}, with commas between")
        return values

    return convert


if __name__ == "__main__":
    main()

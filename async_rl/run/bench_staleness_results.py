"""What the runs of the staleness benchmark come down to: pure functions of its file's `runs`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from async_rl.run.bench_staleness_plan import UNCORRECTED

Run = Mapping[str, Any]
"""A Cell and its Outcome as one JSON object."""

LAST = 3  # evaluations whose mean is a run's result: one of 512 answers has a standard error of 0.02
ON_POLICY = "on-policy"


class Place(NamedTuple):
    """Where corrections are compared: all but the correction and the seed."""

    lag: int
    reuse: int
    learning_rate: float

    @property
    def name(self) -> str:
        reuse = f", each batch {self.reuse} times" if self.reuse > 1 else ""
        return f"lag {self.lag}{reuse}, learning rate {self.learning_rate:g}"


class Row(NamedTuple):
    """One correction at one place over its seeds: `final`, the on-policy `gap` and `along` the run, with their standard
    errors (nan with one seed); `lowest` evaluation of any seed. Of the `n` seeds `below` end lower than they began,
    `alarmed` of those `watched` would have ended by an alarm, and `failed` broke off."""

    correction: str
    n: int
    final: float
    error: float
    gap: float
    gap_error: float
    along: float
    along_error: float
    lowest: float
    below: int
    alarmed: int
    watched: int
    failed: int


def place_of(run: Run) -> Place:
    return Place(run["lag"], run["reuse"], run["learning_rate"])


def start(run: Run) -> float:
    return float(run["evals"][0][1])


def final(run: Run) -> float:
    """Mean held-out reward of the last evaluations."""
    return fmean(reward for _, reward in run["evals"][-LAST:])


def lowest(run: Run) -> float:
    return float(min(reward for _, reward in run["evals"]))


def over_training(run: Run) -> float:
    """Mean held-out reward along the run, by the trapezoidal rule over versions."""
    evals = run["evals"]
    if len(evals) < 2:
        return start(run)
    areas = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(evals)]
    return float(sum(areas) / (evals[-1][0] - evals[0][0]))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; nan for the latter with one value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def is_on_policy(run: Run) -> bool:
    return bool(run["correction"] == UNCORRECTED and run["lag"] == 0 and run["reuse"] == 1)


def on_policy(runs: Iterable[Run], learning_rate: float) -> list[Run]:
    """The runs that the others are compared with, by seed."""
    found = [run for run in runs if is_on_policy(run) and run["learning_rate"] == learning_rate]
    return sorted(found, key=lambda run: int(run["seed"]))


def places(runs: Iterable[Run]) -> list[Place]:
    """Without the on-policy runs' own; the rate with the most runs first, then by reuse and falling lag."""
    runs = list(runs)
    count: dict[float, int] = {}
    for run in runs:
        count[run["learning_rate"]] = count.get(run["learning_rate"], 0) + 1
    found = {place_of(run) for run in runs if not is_on_policy(run)}
    return sorted(found, key=lambda place: (-count[place.learning_rate], place.learning_rate, place.reuse, -place.lag))


def by_correction(runs: Iterable[Run], place: Place) -> dict[str, list[Run]]:
    """Those at a place, each correction's by seed."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: int(run["seed"])):
        if place_of(run) == place:
            found.setdefault(run["correction"], []).append(run)
    return found


def rows(runs: Sequence[Run], place: Place) -> list[Row]:
    """A line for on-policy learning, then one for each correction, best first. The gap is that to on-policy learning
    with the same seeds, whose prompts and random numbers are the same."""
    base = on_policy(runs, place.learning_rate)
    table = [_row(ON_POLICY, base, base)] if base else []
    others = [_row(name, of, base) for name, of in by_correction(runs, place).items()]
    return table + sorted(others, key=lambda row: -row.final)


def _row(name: str, of: Sequence[Run], base: Sequence[Run]) -> Row:
    reference = {run["seed"]: final(run) for run in base}
    gaps = [final(run) - reference[run["seed"]] for run in of if run["seed"] in reference]
    gap = mean_and_error(gaps) if gaps else (math.nan, math.nan)
    return Row(
        name, len(of), *mean_and_error([final(run) for run in of]), *gap,
        *mean_and_error([over_training(run) for run in of]), min(map(lowest, of)),
        below=sum(final(run) < start(run) for run in of),
        alarmed=sum(run.get("alarm_at") is not None for run in of),
        watched=sum("alarm_at" in run for run in of),
        failed=sum(bool(run["error"]) for run in of),
    )  # fmt: skip

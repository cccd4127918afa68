"""What every benchmark shares: arms measured in turn, medians with their spread, ratios within a round, one table, one
file, one comparison.

Figures of one machine do not carry over to another, and on a shared one they move by the minute. So each cell measures
its baseline in the same run, every round runs all arms once in a rotated order, and an arm is judged by the median of
its within-round ratios to the baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from async_rl.errors import AsyncRLError
from async_rl.run.exit_code import exit_code

Measures = dict[str, float]
"""One measurement by metric key."""

PLAIN_WIDTH = 200  # columns where there is no terminal that says how wide it is
LIBRARIES = ("torch", "transformers", "pyzmq", "msgspec", "numpy")


class Unmeasured(Exception):
    """Raised by an arm that cannot be measured on this machine: a result like any other, which the table gives in
    these words."""


class Metric(NamedTuple):
    """A key of Measures as the table shows it, with `digits` significant digits. The first of a benchmark's metrics is
    the one that ratios are taken of."""

    key: str
    label: str
    better: Literal["higher", "lower"]
    digits: int = 3


class Arm(NamedTuple):
    name: str
    measure: Callable[[], Measures]


class Cell(NamedTuple):
    """Arms under equal conditions; `baseline` names the one that the others are compared with."""

    name: str
    arms: Sequence[Arm]
    baseline: str


def run_bench(
    name: str,
    cells: Sequence[Cell],
    metrics: Sequence[Metric],
    rounds: int,
    settings: Mapping[str, Any],
    console: Console,
) -> dict[str, Any]:
    """Measure everything; returns the document that `finish_bench` prints and writes. Errors of an arm end it, but for
    Unmeasured, after which it is not tried again."""
    results: list[dict[str, Any]] = []
    for cell in cells:
        if cell.baseline not in {arm.name for arm in cell.arms}:
            raise ValueError(f"cell {cell.name!r}: its baseline {cell.baseline!r} is none of its arms")
        values: dict[str, dict[str, list[float]]] = {arm.name: {} for arm in cell.arms}
        unmeasured: dict[str, str] = {}
        for index in range(rounds):
            turn = index % len(cell.arms)
            for arm in (*cell.arms[turn:], *cell.arms[:turn]):
                if arm.name in unmeasured:
                    continue
                console.print(f"{cell.name}: round {index + 1} of {rounds}, {arm.name}", style="dim", highlight=False)
                try:
                    measures = arm.measure()
                except Unmeasured as why:
                    unmeasured[arm.name] = str(why)
                    values[arm.name].clear()
                    continue
                for key, value in measures.items():
                    values[arm.name].setdefault(key, []).append(float(value))
        results.append({"cell": cell.name, "baseline": cell.baseline, "arms": values, "unmeasured": unmeasured})
    return {
        "bench": name,
        "made": made_now(),
        "machine": machine(),
        "settings": {"rounds": rounds, **settings},
        "metrics": [metric._asdict() for metric in metrics],
        "cells": results,
    }


def made_now() -> str:
    """When a benchmark was made: UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    libraries = {}
    for library in LIBRARIES:
        try:
            libraries[library] = version(library)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "processor": _processor(),
        "python": platform.python_version(),
        "libraries": libraries,
    }


def ratios(cell: Mapping[str, Any], arm: str, metric: Mapping[str, Any]) -> list[float]:
    """Of an arm to its cell's baseline, round by round, so that above 1 is better; none if one of them could not be
    measured."""
    if {arm, cell["baseline"]} & set(cell.get("unmeasured", ())):
        return []
    of, base = cell["arms"][arm][metric["key"]], cell["arms"][cell["baseline"]][metric["key"]]
    pairs = [(a, b) if metric["better"] == "higher" else (b, a) for a, b in zip(of, base, strict=True)]
    return [a / b if b else float("inf") for a, b in pairs]


# --- the command -----------------------------------------------------------------------------------------------------


def bench_parser(module: str, about: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog=f"async-rl bench {module}", description=about)
    parser.add_argument("--rounds", type=positive, default=rounds, help="how often each arm is measured (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to FILE")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="show an earlier run's file beside this one")
    parser.set_defaults(bench=module)
    parser.add_argument("--quick", action="store_true", help="few, short measurements: whether it works, not how fast")
    return parser


def finish_bench(document: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    """Print the table, write --json, print the comparison. Raises AsyncRLError for a file that cannot be used."""
    console.print(bench_tables(document))
    if options.json is not None:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise AsyncRLError(f"--json {options.json}: cannot be written: {error.strerror}") from error
        console.print(f"written: {options.json}", highlight=False, soft_wrap=True)
    if options.compare is not None:
        console.print(comparison_tables(_read(options.compare, options.bench), document))


def bench_main(main: Callable[[argparse.Namespace, Console], None], parser: argparse.ArgumentParser) -> None:
    """Run a benchmark's `main` as a process: one message for an error, 130 for Ctrl-C."""
    options = parser.parse_args()

    def run() -> None:
        if options.compare is not None:
            _read(options.compare, options.bench)  # before anything is measured
        main(options, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))

    if code := exit_code(run):
        sys.exit(code)


def bench_tables(document: Mapping[str, Any]) -> Group:
    """A table for each cell: medians with their spread over the rounds; `ratio` is the median of the within-round
    ratios of the first metric to the cell's baseline, above 1 meaning better."""
    parts: list[Table | Text] = []
    for cell in document["cells"]:
        parts += [_cell_table(cell, document), *(Text(f"{line}\n") for line in remarks(cell))]
    return Group(*parts)


def remarks(cell: Mapping[str, Any]) -> list[str]:
    """What is said below a cell's table: which arms could not be measured, and what a benchmark has put into the
    cell's "remarks"."""
    return [*(f"{arm}: {why}" for arm, why in cell.get("unmeasured", {}).items()), *cell.get("remarks", [])]


def _cell_table(cell: Mapping[str, Any], document: Mapping[str, Any]) -> Table:
    metrics, rounds = document["metrics"], document["settings"]["rounds"]
    table = _table(f"{document['bench']}: {cell['cell']} (medians of {rounds}, lowest–highest)")
    table.add_column("arm", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for metric in metrics:
        table.add_column(metric["label"], justify="right", no_wrap=True)
    for arm, values in cell["arms"].items():
        row = [spread(values.get(metric["key"]), metric["digits"]) for metric in metrics]
        base = arm == cell["baseline"]
        table.add_row(arm, "baseline" if base else spread(ratios(cell, arm, metrics[0]), 3), *row)
    return table


def comparison_tables(old: Mapping[str, Any], new: Mapping[str, Any]) -> Group:
    """Ratios to the baseline, then and now: what a change of machine does not move. Cells and arms of both."""
    metric = new["metrics"][0]
    before = {cell["cell"]: cell for cell in old["cells"]}
    tables = []
    for cell in new["cells"]:
        earlier = before.get(cell["cell"])
        if earlier is None or earlier["baseline"] != cell["baseline"]:
            continue
        table = _table(f"{cell['cell']}: ratio to {cell['baseline']!r} ({metric['label']}), {old['made']} and now")
        for column in ("arm", "then", "now", "now / then"):
            table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
        for arm in cell["arms"]:
            if arm != cell["baseline"] and arm in earlier["arms"]:
                then, now = ratios(earlier, arm, metric), ratios(cell, arm, metric)
                if then and now:
                    change = median(now) / median(then)
                    table.add_row(arm, f"{median(then):.3g}", f"{median(now):.3g}", f"{change:.2f}")
        tables.append(table)
    if not tables:
        return Group("nothing to compare: no cell with the same baseline is in both")
    return Group(*tables)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _read(path: Path, bench: str) -> dict[str, Any]:
    try:
        old: dict[str, Any] = json.loads(path.read_text())
        if old["bench"] != bench:
            raise AsyncRLError(f"--compare {path}: it is of bench {old['bench']!r}, not {bench!r}")
        bench_tables(old)
    except OSError as error:
        raise AsyncRLError(f"--compare {path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AsyncRLError(f"--compare {path}: it is not a file of `async-rl bench … --json`: {error!r}") from error
    return old


def spread(values: Sequence[float] | None, digits: int) -> str:
    """`median (lowest–highest)` to a number of significant digits; a dash for nothing."""
    if not values:
        return "–"
    low, high = min(values), max(values)
    middle = _significant(median(values), digits)
    return middle if len(values) == 1 else f"{middle} ({_significant(low, digits)}–{_significant(high, digits)})"


def _significant(value: float, digits: int) -> str:
    """`digits` significant digits, thousands separated, never in powers of ten."""
    if value and abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def positive(text: str) -> int:
    """A count on the command line; raises ArgumentTypeError for what is none."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")

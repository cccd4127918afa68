"""`async-rl plan CONFIG`: how many inference nodes and trainer workers, what they will yield, and where the knee is.

    async-rl plan quickstart --from runs/latest --nodes 8 --plot plan.png
    async-rl plan my.toml --from runs/latest --machines 16

Each point is a run of the real rules under a virtual clock (see `async-rl simulate`). The knee is the fewest nodes
whose yield is within 5 % of the best. With --machines the best split between nodes and trainer workers is looked for;
today there is one trainer process, so more workers are an assumption: that k of them need a k-th of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from async_rl.errors import AsyncRLError
from buffer.assumptions import World, add_options, world_from
from buffer.forecast import Forecast, describe, document, forecast, run_command, write_json
from buffer.scenario import Constant, TrainerSpeed, as_table

KNEE_SHARE = 0.95  # of the best yield
ORANGE, GREEN, BLUE, VIOLET, RED = "#e07b16", "#2a8a4a", "#1f6fb4", "#7b5aa6", "#c0392b"
NODES = 8  # looked at, unless asked for others


class Point(NamedTuple):
    """One split: what it yields, and what either pool would yield alone if the other cost no time (steps/s)."""

    nodes: int
    workers: int
    forecast: Forecast
    nodes_limit: float
    trainer_limit: float

    @property
    def limited_by(self) -> str:
        return "nodes" if self.nodes_limit < self.trainer_limit else "trainer"


def plan_point(world: World, nodes: int, workers: int) -> Point:
    """Two simulated runs: the split as it is, and with a trainer that needs no time. Raises AsyncRLError when the run
    cannot go on."""
    scenario = world.scenario._replace(nodes=nodes, trainer=world.scenario.trainer._replace(workers=workers))
    real = forecast(world.rules, scenario)
    alone = forecast(world.rules, scenario._replace(trainer=TrainerSpeed(step_s=Constant(0.0))))
    for item in (real, alone):
        if item.error:
            raise AsyncRLError(f"{nodes} nodes, {workers} trainer workers: the simulated run ended: {item.error}")
    return Point(nodes, workers, real, alone.steps_per_s, trainer_limit(world, workers))


def trainer_limit(world: World, workers: int) -> float:
    """Steps/s of a trainer that never waits for a batch."""
    rules, speed = world.rules, world.scenario.trainer
    tokens = rules.groups_per_step * rules.group_size * world.scenario.lengths.mean
    cycle = speed.step_s.mean + speed.token_s * tokens + speed.export_s.mean + speed.upload_s.mean
    save = speed.checkpoint_s / speed.checkpoint_every if speed.checkpoint_every else 0.0
    return 1.0 / (cycle / workers + speed.lend_s + speed.rest_s.mean + save)


def knee(points: Sequence[Point]) -> Point:
    """The fewest nodes within 5 % of the best yield among these."""
    best = max(point.forecast.steps_per_s for point in points)
    return min(
        (point for point in points if point.forecast.steps_per_s >= KNEE_SHARE * best), key=lambda point: point.nodes
    )


def best_split(points: Sequence[Point]) -> Point:
    """The highest yield; of equals, the freshest data."""
    return max(points, key=lambda point: (point.forecast.steps_per_s, -point.forecast.staleness_mean))


def plan_table(points: Sequence[Point], marked: Point, mark: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "nodes", "trainer workers", "steps/s", "trained tok/s", "limited by", "idle nodes", "idle trainer",
        "staleness mean", "max",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for point in points:
        item = point.forecast
        table.add_row(
            str(point.nodes), str(point.workers), f"{item.steps_per_s:.4g}", f"{item.tokens_per_s:.5g}",
            point.limited_by, f"{item.nodes_idle:.1%}", f"{item.trainer_idle:.1%}", f"{item.staleness_mean:.2f}",
            str(item.staleness_max), mark if point is marked else "",
        )  # fmt: skip
    return table


def point_table(point: Point) -> dict[str, Any]:
    return {
        **as_table(point.forecast), "workers": point.workers, "nodes_limit": point.nodes_limit,
        "trainer_limit": point.trainer_limit, "limited_by": point.limited_by,
    }  # fmt: skip


def draw(points: Sequence[Point], marked: Point, path: Path) -> None:
    """Yield over nodes with both pools' limits, staleness and idle shares below. Raises AsyncRLError without
    matplotlib, or when the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise AsyncRLError(
            "--plot needs matplotlib, which is not installed here: pip install matplotlib, or leave --plot out"
        ) from error
    figure = Figure(figsize=(7, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    age = below.twinx()
    nodes = [point.nodes for point in points]
    best = max(point.forecast.steps_per_s for point in points)

    above.plot(nodes, [point.nodes_limit for point in points], ":", color=ORANGE, label="nodes alone")
    above.plot(nodes, [point.trainer_limit for point in points], "--", color=GREEN, label="trainer alone")
    above.plot(nodes, [point.forecast.steps_per_s for point in points], "o-", color=BLUE, label="both: the yield")
    above.plot(marked.nodes, marked.forecast.steps_per_s, "o", color=RED, markersize=12, fillstyle="none",
               label=f"chosen: {marked.nodes} nodes, {marked.workers} trainer worker(s)")  # fmt: skip
    above.set_ylabel("training steps per second")
    above.set_ylim(0, 1.3 * best)

    for pool, colour in (("nodes", ORANGE), ("trainer", GREEN)):
        idle = [100 * getattr(point.forecast, f"{pool}_idle") for point in points]
        below.plot(nodes, idle, "o-", color=colour, label=f"{pool} idle")
    age.plot(nodes, [point.forecast.staleness_mean for point in points], "s-", color=VIOLET, label="mean staleness")
    below.set_ylim(0, 100)
    below.set_ylabel("idle, %")
    below.set_xlabel("inference nodes")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    age.set_ylim(bottom=0)
    age.set_ylabel("mean staleness, versions")

    for axes in (above, below, age):
        axes.spines["top"].set_visible(False)
    above.legend(loc="lower right")
    lines = [*below.get_lines(), *age.get_lines()]
    labels = [str(line.get_label()) for line in lines]
    below.legend(lines, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise AsyncRLError(f"--plot {path}: cannot be written: {error}") from error


def plan_command(options: argparse.Namespace, console: Console) -> None:
    world = world_from(options)
    for line in describe(world):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.machines:
        splits = [(nodes, options.machines - nodes) for nodes in range(1, options.machines)]
    else:
        splits = [(nodes, 1) for nodes in range(1, options.nodes + 1)]
    points = []
    for nodes, workers in splits:
        with console.status(f"{nodes} nodes, {workers} trainer workers"):
            points.append(plan_point(world, nodes, workers))
    chosen = best_split(points) if options.machines else knee(points)
    console.print(plan_table(points, chosen, "best split" if options.machines else "knee"))
    console.print(verdict(chosen, options.machines), highlight=False, soft_wrap=True)
    if options.json is not None:
        table = [point_table(point) for point in points]
        write_json(options.json, document(world, points=table, chosen=point_table(chosen)))
    if options.plot is not None:
        draw(points, chosen, options.plot)
        console.print(f"written: {options.plot}", highlight=False, soft_wrap=True)


def verdict(chosen: Point, machines: int | None) -> str:
    item = chosen.forecast
    nodes = f"{chosen.nodes} inference node{'s' if chosen.nodes > 1 else ''}"
    if machines:
        workers = f"{chosen.workers} trainer worker{'s' if chosen.workers > 1 else ''}"
        what = f"best split of {machines} machines: {nodes} and {workers}"
        if chosen.workers > 1:
            what += f", if {chosen.workers} workers do train {chosen.workers} times as fast as one"
    else:
        what = f"knee: {nodes}; more add less than 5 %"
    pace = "the nodes set" if chosen.limited_by == "nodes" else "the trainer sets"
    return (
        f"{what}. That yields {item.steps_per_s:.3g} steps/s, {item.tokens_per_s:.4g} trained tokens/s at a mean "
        f"staleness of {item.staleness_mean:.2f}; {pace} the pace."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="async-rl plan", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    many = parser.add_mutually_exclusive_group()
    many.add_argument(
        "--nodes", type=_at_least(1), default=NODES, metavar="N", help="look at 1 to N inference nodes (%(default)s)"
    )
    many.add_argument(
        "--machines", type=_at_least(2), metavar="N", help="look for the best split of N machines between both pools"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw yield, limits and idle shares over nodes")
    return run_command(plan_command, parser, arguments)


def _at_least(least: int) -> Any:
    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: {least} or more")
        return value

    return count


if __name__ == "__main__":
    sys.exit(main())

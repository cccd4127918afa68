"""`async-rl simulate CONFIG`: the real rules under a virtual clock, from ten nodes to ten thousand.

    async-rl simulate quickstart --from runs/latest
    async-rl simulate my.toml --from runs/latest --nodes 64 --life 3600 --join 32@600
    async-rl simulate my.toml --tokens-per-second 2500 --lengths 400,0.7 --train-seconds 20 --json forecast.json

Throughput, staleness, waste and idle time for each number of nodes. Rates, staleness and the trainer's idle time leave
out the first steps, until batches are as old as they will be (buffer.fit.settled).

How long answers happen to be decides which batch waits for which, so runs differ by chance: of 50 steps of one node by
some 3 % in staleness (docs/simulate). What is said is the mean over several simulated runs, and how far they lie apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from async_rl.errors import AsyncRLError
from async_rl.run.exit_code import exit_code
from buffer.assumptions import World, add_options, world_from
from buffer.fit import settled
from buffer.rules import Rules
from buffer.scenario import Scenario, as_table
from buffer.simulate import simulate

NODE_COUNTS = (10, 100, 1000, 10_000)
RUNS = 16  # simulated for one forecast: their mean is then known to a quarter of what they lie apart
ENOUGH_EVENTS = 20_000  # a second or two; a run with many nodes has so many itself, and is averaged in itself too
PLAIN_WIDTH = 160  # columns where there is no terminal that says how wide it is


class Forecast(NamedTuple):
    """Of one simulated run, or the mean of several (`runs`; `events` and `took_s` are then all of theirs, and
    `staleness_max` the most of any). `tokens_per_s` are trained; `wasted` is the share of sampled training tokens that
    were never trained, `dropped` says by reason how many attempts; `error` is not empty when a run could not go on. The
    spreads are standard deviations between runs that differ by chance alone; 0 of a single one.
    `control_messages` are those to and from the buffer that carry no attempt, for each attempt that came back."""

    nodes: int
    steps_per_s: float
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    wasted: float
    dropped: dict[str, float]
    nodes_idle: float
    trainer_idle: float
    steps: float
    virtual_s: float
    events: int
    took_s: float
    error: str
    runs: int = 1
    steps_per_s_spread: float = 0.0
    staleness_spread: float = 0.0
    control_messages: float = 0.0


def average_forecast(rules: Rules, scenario: Scenario) -> Forecast:
    """The mean over RUNS simulated runs, or as many as it takes to ENOUGH_EVENTS: with the scenario's seed, and with
    those that follow from it."""
    forecasts = [forecast(rules, scenario)]
    # Not seed + 1: a forecast with the next seed is to have none of these runs in it.
    for seed in np.random.SeedSequence(scenario.seed).generate_state(RUNS - 1):
        if forecasts[-1].error or sum(each.events for each in forecasts) >= ENOUGH_EVENTS:
            break
        forecasts.append(forecast(rules, scenario._replace(seed=int(seed))))
    return averaged(forecasts)


def averaged(forecasts: Sequence[Forecast]) -> Forecast:
    """Of runs that differ by their seeds alone, at least one."""
    if len(forecasts) == 1:
        return forecasts[0]

    def mean(field: str) -> float:
        return statistics.fmean(getattr(each, field) for each in forecasts)

    reasons = sorted({reason for each in forecasts for reason in each.dropped})
    return forecasts[0]._replace(
        steps_per_s=mean("steps_per_s"),
        tokens_per_s=mean("tokens_per_s"),
        staleness_mean=mean("staleness_mean"),
        wasted=mean("wasted"),
        nodes_idle=mean("nodes_idle"),
        trainer_idle=mean("trainer_idle"),
        steps=mean("steps"),
        virtual_s=mean("virtual_s"),
        control_messages=mean("control_messages"),
        staleness_max=max(each.staleness_max for each in forecasts),
        dropped={reason: statistics.fmean(each.dropped.get(reason, 0) for each in forecasts) for reason in reasons},
        events=sum(each.events for each in forecasts),
        took_s=sum(each.took_s for each in forecasts),
        error=next((each.error for each in forecasts if each.error), ""),
        runs=len(forecasts),
        steps_per_s_spread=statistics.stdev(each.steps_per_s for each in forecasts),
        staleness_spread=statistics.stdev(each.staleness_mean for each in forecasts),
    )


def forecast(rules: Rules, scenario: Scenario) -> Forecast:
    """One simulated run."""
    started = time.perf_counter()
    # Nothing here makes cycles, and the collector would look through millions of live objects again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        result = simulate(rules, scenario)
    finally:
        if collecting:
            gc.enable()
    first = settled(len(result.log), rules.max_staleness)
    after = result.log[first:]
    span = after[-1].ended_s - (result.log[first - 1].ended_s if first else 0.0) if after else 0.0
    tokens = sum(step.tokens for step in after)
    dropped = {
        place.removeprefix("dropped."): float(count)
        for place, count in result.ledger.items()
        if place.startswith("dropped.") and count
    }
    return Forecast(
        nodes=scenario.nodes,
        steps_per_s=len(after) / span if span else 0.0,
        tokens_per_s=tokens / span if span else 0.0,
        staleness_mean=sum(step.age_tokens for step in after) / tokens if tokens else 0.0,
        staleness_max=result.max_staleness,
        wasted=max(0.0, 1.0 - result.trained_tokens / result.sampled_tokens) if result.sampled_tokens else 0.0,
        dropped=dropped,
        nodes_idle=result.nodes_idle,
        trainer_idle=sum(step.draw_wait_s for step in after) / span if span else 0.0,
        steps=result.steps,
        virtual_s=result.seconds,
        events=result.events,
        took_s=time.perf_counter() - started,
        error=result.error,
        control_messages=sum(result.control.values()) / result.results if result.results else 0.0,
    )


def describe(world: World) -> list[str]:
    """What a forecast is of, and what it assumes, in lines for people."""
    rules, scenario, measured = world.rules, world.scenario, world.measured
    source = f"lengths and speeds of {measured.directory}" if measured else "lengths and speeds as given"
    lines = [
        f"{rules.steps} steps of {rules.groups_per_step} groups of {rules.group_size}, bound {rules.max_staleness}, "
        f"{_order(rules)}, "
        f"{scenario.slots} slots a node; {source}"
    ]
    if measured:
        lines.append(
            f"that run: {measured.steps_per_s:.3g} steps/s, {measured.tokens_per_s:.4g} trained tokens/s, mean "
            f"staleness {measured.staleness:.2f} with {measured.config.inference.nodes} nodes, bound "
            f"{measured.config.buffer.max_staleness}"
        )
    return lines + [f"assumed: {note}" for note in world.notes]


def _order(rules: Rules) -> str:
    """Which groups train, in words."""
    if rules.newest_first:
        return "newest first"
    if rules.reuse > 1:
        return f"{rules.fresh_groups} of them new, each trained up to {rules.reuse} times"
    if rules.on_stale != "wait":
        return f"stale data: {rules.on_stale}"
    return "by ticket" if rules.window == 1 else f"by ticket, within {rules.window}"


def forecast_table(forecasts: Sequence[Forecast]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "nodes", "steps/s", "±", "trained tok/s", "staleness mean", "±", "max", "wasted tokens", "idle nodes",
        "idle trainer", "messages", "runs", "events", "took",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("dropped attempts")
    for item in forecasts:
        dropped = ", ".join(f"{reason} {count:.4g}" for reason, count in item.dropped.items()) or "none"
        rate, age = (
            f"{spread:.2g}" if item.runs > 1 else "" for spread in (item.steps_per_s_spread, item.staleness_spread)
        )
        table.add_row(
            str(item.nodes), f"{item.steps_per_s:.4g}", rate, f"{item.tokens_per_s:.5g}", f"{item.staleness_mean:.2f}",
            age, str(item.staleness_max), f"{item.wasted:.2%}", f"{item.nodes_idle:.1%}", f"{item.trainer_idle:.1%}",
            f"{item.control_messages:.2g}", str(item.runs), str(item.events), f"{item.took_s:.1f} s", dropped,
        )  # fmt: skip
    return table


def document(world: World, **parts: Any) -> dict[str, Any]:
    """What --json writes."""
    measured = world.measured
    return {
        "config": world.config.run.name,
        "rules": as_table(world.rules),
        "scenario": as_table(world.scenario),
        "measured": {key: getattr(measured, key) for key in ("directory", "steps_per_s", "tokens_per_s", "staleness")}
        if measured
        else None,
        "assumed": list(world.notes),
        **parts,
    }


def write_json(path: Path, value: Any) -> None:
    """Raises AsyncRLError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise AsyncRLError(f"--json {path}: cannot be written: {error.strerror}") from error


def run_command(
    command: Callable[[argparse.Namespace, Console], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """One message for an error; 130 for Ctrl-C. Returns the exit code."""
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    return exit_code(lambda: command(options, console), options.debug)


def simulate_command(options: argparse.Namespace, console: Console) -> None:
    world = world_from(options)
    scenario = world.scenario._replace(node_life_s=options.life, joins=tuple(options.join), slowest=options.slowest)
    world = world._replace(scenario=scenario)
    for line in describe(world):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    forecasts = []
    for nodes in options.nodes:
        with console.status(f"{nodes} nodes"):
            forecasts.append(average_forecast(world.rules, scenario._replace(nodes=nodes)))
    console.print(forecast_table(forecasts))
    for item in forecasts:
        if item.error:
            console.print(f"{item.nodes} nodes: {item.error}", highlight=False, markup=False, soft_wrap=True)
    if options.json is not None:
        write_json(options.json, document(world, forecasts=[as_table(item) for item in forecasts]))


def main(arguments: Sequence[str] | None = None) -> int:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="async-rl simulate", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--nodes", type=_counts, default=NODE_COUNTS, metavar="N,N,…", help="numbers of nodes (10,100,1000,10000)"
    )
    parser.add_argument(
        "--life", type=_seconds, default=0.0, metavar="SECONDS",
        help="a node's mean life; it dies without a word, and joins again 10 s later (default: none dies)",
    )  # fmt: skip
    parser.add_argument(
        "--join", type=_join, action="append", default=[], metavar="N@SECONDS", help="N more nodes join then"
    )
    parser.add_argument(
        "--slowest", type=_factor, default=1.0, metavar="FACTOR",
        help="nodes differ: each is slower by a factor between 1 and this (default: all are alike)",
    )  # fmt: skip
    return run_command(simulate_command, parser, arguments)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: 1 or more nodes")
    return counts


def _seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: not below 0")
    return value


def _factor(text: str) -> float:
    value = float(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: 1 or more")
    return value


def _join(text: str) -> tuple[float, int]:
    count, at, seconds = text.partition("@")
    try:
        join = float(seconds), int(count)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected N@SECONDS, for example 32@600") from error
    if not at or join[0] < 0 or join[1] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected N@SECONDS, for example 32@600")
    return join


if __name__ == "__main__":
    sys.exit(main())

"""`async-rl bench transport`: how fast trajectories travel from the nodes to the buffer, and on to the trainer.

The limit is what ZeroMQ does with one frame a trajectory from PUSH to PULL, with nothing acknowledged, credited,
leased or accounted for; the other arms are compared with it in the same round. What the arms do is said in
bench_transport_arms.py and bench_transport_link.py; bench_transport_house.py starts the buffer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from rich.console import Console

from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from async_rl.wire.messages import COALESCE_BYTES
from buffer.bench_transport_arms import Load, measure_push, measure_queue
from buffer.bench_transport_link import DRAW_STALENESS, measure_draw, measure_ingest, per_message

BASELINE = "raw PUSH/PULL, one frame"
CURVE_BASELINE = "raw PUSH/PULL, one frame, CURVE"
METRICS = (
    Metric("traj_per_s", "trajectories/s", "higher"),
    Metric("cpu_us_per_traj", "CPU µs each", "lower"),
    Metric("mb_per_s", "MB/s", "higher"),
)
WARM_S, WINDOW_S = 0.5, 2.0
QUICK_WARM_S, QUICK_WINDOW_S = 0.2, 0.5
QUICK_CELLS = 2  # of a length: with more, a quick run would take minutes


def arms(load: Load, curve: bool = False) -> dict[str, Callable[[], Measures]]:
    found: dict[str, Callable[[], Measures]] = {
        BASELINE: partial(measure_push, load, lists=False),
        "msgpack lists": partial(measure_push, load, lists=True),
        "multiprocessing queue": partial(measure_queue, load),
        "link: ingest": partial(measure_ingest, load, coalesced=False),
        "link: ingest + draw": partial(measure_draw, load, coalesced=False),
        "link: ingest, journal": partial(measure_ingest, load, coalesced=False, journal=True),
    }
    if curve:
        found[CURVE_BASELINE] = partial(measure_push, load, lists=False, curve=True)
        found["link: ingest, CURVE"] = partial(measure_ingest, load, coalesced=False, curve=True)
    if per_message(load, coalesced=True) > 1:
        found["link: ingest, coalesced"] = partial(measure_ingest, load, coalesced=True)
        found["link: ingest + draw, coalesced"] = partial(measure_draw, load, coalesced=True)
    return found


def main(options: argparse.Namespace, console: Console) -> None:
    times = (QUICK_WARM_S, QUICK_WINDOW_S) if options.quick else (WARM_S, WINDOW_S)
    cells = []
    for tokens in options.tokens:
        for producers in options.producers[: QUICK_CELLS if options.quick else None]:
            load = Load(tokens, producers, *times)
            chosen = [
                Arm(name, measure)
                for name, measure in arms(load, options.curve).items()
                if selected(name, options.arms)
            ]
            cells.append(Cell(f"{tokens} tokens, {producers} producers", chosen, BASELINE))
    settings = {
        "tokens": options.tokens, "producers": options.producers, "window_s": times[1],
        "max_staleness": DRAW_STALENESS, "frame_bytes": COALESCE_BYTES,
    }  # fmt: skip
    rounds = 1 if options.quick else options.rounds
    finish_bench(run_bench("transport", cells, METRICS, rounds, settings, console), options, console)


def selected(name: str, wanted: list[str]) -> bool:
    return name in (BASELINE, CURVE_BASELINE) or not wanted or any(part in name for part in wanted)


def parser() -> argparse.ArgumentParser:
    parser = bench_parser("transport", "Trajectories through the buffer, against raw ZeroMQ.", rounds=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], metavar="N")
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--curve", action="store_true", help="also encrypted: raw ZeroMQ, and the link's ingest")
    parser.add_argument("--arms", nargs="+", default=[], metavar="TEXT", help="only arms whose name contains one")
    return parser


if __name__ == "__main__":
    bench_main(main, parser())

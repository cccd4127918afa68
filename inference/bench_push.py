"""`async-rl bench push`: how long a new policy takes from the trainer's file to the nodes that serve it.

One push: an adapter goes from one process to N receiver processes of this machine. The clock starts when the sender
begins; `verified` is when the last receiver has checked the file's SHA-256 and the tensors' digest, `flipped` when
the last one has matched them with the modules of its model, loaded them into the policy slot that did not serve
(bfloat16, unmerged, as the torch engine holds them), and its next forward would compute with them. The receivers do
nothing else meanwhile, while a node samples.

The store's way, and the same where every receiver relays (docs/relay.md), are compared, in the same round, with raw TCP
and with a copy through shared memory. These show what the
machine can move, and are no protocols: they make nothing durable, verify nothing and have no slots, so that their
`flipped` is when the last receiver has the bytes in memory of its own. (TCP sends while it is received, the copy in
and the copies out follow one another: to a single receiver TCP may be the faster.) See bench_push_arms.py for the
sender and bench_push_receiver.py for a receiver.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial

import torch
from rich.console import Console

from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from inference.bench_push_arms import PushHouse
from inference.bench_push_receiver import PushError, Way

BASELINE: Way = "raw TCP"
WAYS: tuple[Way, ...] = ("store", "relay", BASELINE, "shared memory")
METRICS = (
    Metric("flipped_ms", "ms to flipped", "lower"),
    Metric("verified_ms", "ms to verified", "lower"),
    Metric("stored_ms", "ms to stored", "lower"),
    Metric("gb_per_s", "GB/s to flipped", "higher"),
    Metric("cpu_ms", "CPU ms", "lower"),
    Metric("node_cpu_ms", "CPU ms a receiver", "lower"),
)
MEGABYTE = 1_000_000
SIZES, RECEIVERS, PUSHES = (1, 160), (1, 4, 16), 3
QUICK_SIZES, QUICK_RECEIVERS, QUICK_PUSHES, QUICK_ROUNDS = (1,), (1, 4), 2, 2
TERMINATED_EXIT = 128 + signal.SIGTERM
# What a receiver holds at most: the policy that serves, the one before it, the one that comes, and the memory that the
# other ways fill; and what a forked process adds of its own. The sender and the store hold a few more.
COPIES, OTHER_COPIES, PROCESS_BYTES = 4, 8, 64 * MEGABYTE


def measure(house: PushHouse, way: Way, size: int, count: int, pushes: int) -> Measures:
    push = house.measure(way, size, count, pushes)
    measures = {
        "flipped_ms": push.flipped_ms,
        "gb_per_s": house.adapter_bytes(size) * count / push.flipped_ms / 1e6,
        "cpu_ms": push.cpu_ms,
        "node_cpu_ms": push.node_cpu_ms,
    }
    if way in ("store", "relay"):
        measures |= {"verified_ms": push.verified_ms, "fetched_ms": push.fetched_ms, "stored_ms": push.stored_ms}
    return measures


def main(options: argparse.Namespace, console: Console) -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(TERMINATED_EXIT))  # so that what was started ends
    torch.set_num_threads(1)
    quick = options.quick
    sizes = [size * MEGABYTE for size in options.sizes or (QUICK_SIZES if quick else SIZES)]
    receivers = options.receivers or (QUICK_RECEIVERS if quick else RECEIVERS)
    pushes = QUICK_PUSHES if quick else PUSHES
    rounds = min(options.rounds, QUICK_ROUNDS) if quick else options.rounds
    check_memory(max(sizes), max(receivers))
    with PushHouse(sizes, max(receivers)) as house:
        cells = [
            Cell(
                f"{size // MEGABYTE} MB to {count} receiver{'s' if count > 1 else ''}",
                [Arm(way, partial(measure, house, way, size, count, pushes)) for way in WAYS],
                BASELINE,
            )
            for size in sizes
            for count in receivers
        ]
        settings = {"adapter_bytes": [house.adapter_bytes(size) for size in sizes], "pushes": pushes}
        document = run_bench("push", cells, METRICS, rounds, settings, console)
    finish_bench(document, options, console)


def check_memory(size: int, receivers: int) -> None:
    """Raises PushError when so many receivers of so large an adapter would not fit."""
    needed = receivers * (COPIES * size + PROCESS_BYTES) + OTHER_COPIES * size
    available = available_bytes()
    if needed > available:
        raise PushError(
            f"{receivers} receivers of {size // MEGABYTE} MB need about {needed / 1e9:.1f} GB of memory, and "
            f"{available / 1e9:.1f} GB are available: use fewer --receivers or smaller --sizes"
        )


def available_bytes() -> int:
    """Memory that can be had without swapping: MemAvailable of /proc/meminfo, elsewhere all of it."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parser() -> argparse.ArgumentParser:
    parser = bench_parser("push", "A policy from trainer to nodes, against raw TCP and shared memory.", rounds=3)
    parser.add_argument("--sizes", type=positive, nargs="+", metavar="MB", help="of the adapter (1 160)")
    parser.add_argument("--receivers", type=positive, nargs="+", metavar="N", help="processes (1 4 16)")
    return parser


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


if __name__ == "__main__":
    bench_main(main, parser())

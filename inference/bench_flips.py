"""`async-rl bench flips`: how long after a training step the first token comes of the new policy, and what it costs.

The engine of the config samples for `--requests` requests at a time, kept full as a node with leases is. The clock of a
push starts when the trainer begins to write the policy that it has on its hands, digest included, and stops when the
engine has sampled the first token under it; in between are the real policy store, the node's puller and its slots. (A
trainer also tells the buffer, of which there is none here; and a node has more to do: leases, scoring, proofs.)

What a push costs is sampled less: every round has a window without pushes and one with, so many seconds apart, and each
way of treating requests in flight has its own engine. `tokens/s` counts requests that were done. Sampling lost a push,
in milliseconds: how much longer the window with pushes was than one without needs for as many tokens, over its pushes.
`in flight at most` is the engine's own limit, which follows its load (inference.concurrency). vLLM and SGLang hand over
tokens in pieces, so that of requests which go on under `continue` the first one may have been sampled a little earlier.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, get_args

import msgspec
import numpy as np
import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from async_rl.buffer_config import BufferConfig
from async_rl.config import Config, ConfigError, check_config, load_config, with_group
from async_rl.run.bench import (
    Arm,
    Cell,
    Measures,
    Metric,
    Unmeasured,
    bench_main,
    bench_parser,
    finish_bench,
    positive,
    run_bench,
)
from inference.bench_flips_house import FlipsError, FlipsHouse, NoStart, Push
from inference.bench_load import made_model
from inference.engine import InFlight

QUIET, PUSHES = "no pushes", "pushes"
METRICS = (
    Metric("tokens_per_s", "tokens/s", "higher"),
    Metric("first_ms", "ms to first token", "lower"),
    Metric("stored_ms", "to stored", "lower"),
    Metric("fetched_ms", "to fetched", "lower"),
    Metric("flipped_ms", "to flipped", "lower"),
    Metric("limit", "in flight at most", "higher"),
    Metric("lost_ms", "ms of sampling lost a push", "lower"),
)
WARM_PUSHES, WARM_S = 3, 3.0  # before anything is measured: caches fill, and requests come out of step
TERMINATED_EXIT = 128 + signal.SIGTERM


class FlipArms:
    """The two windows of a round. `pushes` are all of them, over all rounds."""

    def __init__(self, house: FlipsHouse, count: int, interval_s: float) -> None:
        self._house, self._count, self._interval_s = house, count, interval_s
        self.pushes: list[Push] = []

    def quiet(self) -> Measures:
        start = time.monotonic()
        self._house.rest(self._count * self._interval_s)
        return self._house.sampled(start, time.monotonic())

    def pushing(self) -> Measures:
        """A push that takes longer than the interval is followed by the next at once."""
        start, pushes = time.monotonic(), []
        for number in range(self._count):
            pushes.append(self._house.push())
            self._house.rest(start + (number + 1) * self._interval_s - time.monotonic())
        end = time.monotonic()
        self.pushes += pushes
        columns = dict(zip(Push._fields, zip(*pushes, strict=True), strict=True))
        return {
            **self._house.sampled(start, end),
            "window_s": end - start,
            **{key: median(values) for key, values in columns.items()},
        }


def measured(config: Config, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The document of one way of treating requests in flight."""
    name = f"{config.inference.engine}, {config.trainer.kind}, {config.inference.in_flight}"
    rounds, count, interval_s = shape(options)
    settings = {
        "config": options.config, "requests": options.requests, "pushes": rounds * count, "interval_s": interval_s,
    }  # fmt: skip
    try:
        check_config(config)
        with FlipsHouse(config) as house:
            for _ in range(WARM_PUSHES):
                house.push()
            house.rest(0.5 if options.quick else WARM_S)
            arms = FlipArms(house, count, interval_s)
            cell = Cell(name, [Arm(QUIET, arms.quiet), Arm(PUSHES, arms.pushing)], QUIET)
            document = run_bench("flips", [cell], METRICS, rounds, settings, console)
            document["cells"][0]["describe"] = house.describe
        add_losses(document["cells"][0], arms.pushes, count)
        return document
    except (ConfigError, NoStart) as refusal:
        console.print(str(refusal), style="dim", highlight=False, markup=False, soft_wrap=True)
        why = refusal.why if isinstance(refusal, NoStart) else str(refusal)
        cell = Cell(name, [Arm(QUIET, partial(unmeasured, why))], QUIET)
        return run_bench("flips", [cell], METRICS, 1, settings, console)


def unmeasured(why: str) -> Measures:
    raise Unmeasured(why)


def add_losses(cell: dict[str, Any], pushes: Sequence[Push], count: int) -> None:
    """What each round lost, every push as it was, and the words below the table. `count` pushes a window."""
    arms = cell["arms"]
    quiet, pushing = arms[QUIET]["tokens_per_s"], arms[PUSHES]["tokens_per_s"]
    windows = zip(quiet, pushing, arms[PUSHES]["window_s"], strict=True)
    lost_ms = [1e3 * window_s * (1 - with_pushes / without) / count for without, with_pushes, window_s in windows]
    arms[PUSHES]["lost_ms"] = lost_ms
    cell["pushes"] = [push._asdict() for push in pushes]
    first = [push.first_ms for push in pushes]
    p50, p99 = np.percentile(first, [50, 99])
    lost_rate, every_s = median(quiet) - median(pushing), median(arms[PUSHES]["window_s"]) / count
    cell["remarks"] = [
        f"{len(first)} pushes, to the first token: p50 {p50:,.0f} ms, p99 {p99:,.0f} ms, slowest {max(first):,.0f} ms",
        f"{lost_rate:,.0f} tokens/s less with a push every {every_s:.2g} s: {median(lost_ms):,.0f} ms of sampling lost "
        "a push",
    ]


def shape(options: argparse.Namespace) -> tuple[int, int, float]:
    """Rounds, pushes in each, and the seconds from one to the next."""
    if options.quick:
        return 2, 2, 0.25
    rounds = min(options.rounds, options.pushes)
    return rounds, -(-options.pushes // rounds), options.interval


def configured(options: argparse.Namespace) -> Config:
    """That of one node alone, in a run of its own on this machine. Raises AsyncRLError."""
    overrides = [*options.overrides, "run.eval_every=0"]
    config = with_group(load_config(options.config, overrides), options.group)
    model = made_model(config, options.config, overrides).resolve()
    inference = msgspec.structs.replace(config.inference, nodes=1, slots=options.requests)
    if inference.engine == "torch" and inference.compile == "auto":  # else it would be compiled in the middle
        inference = msgspec.structs.replace(inference, compile="never")
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(model)),
        inference=inference,
        buffer=msgspec.structs.replace(
            config.buffer, endpoint=BufferConfig().endpoint, store_endpoint=BufferConfig().store_endpoint, keys=""
        ),
    )


def main(options: argparse.Namespace, console: Console) -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(TERMINATED_EXIT))  # so that what was started ends
    torch.set_num_threads(1)
    disable_progress_bar()
    config = configured(options)
    documents = []
    for in_flight in options.in_flight or get_args(InFlight):
        inference = msgspec.structs.replace(config.inference, in_flight=in_flight)
        documents.append(measured(msgspec.structs.replace(config, inference=inference), options, console))
    cells = [cell for document in documents for cell in document["cells"]]
    if all(cell["unmeasured"] for cell in cells):
        raise FlipsError(f"nothing could be measured: {next(iter(cells[0]['unmeasured'].values()))}")
    document = next(each for each in documents if not each["cells"][0]["unmeasured"]) | {"cells": cells}
    finish_bench(document, options, console)


def parser() -> argparse.ArgumentParser:
    parser = bench_parser("flips", "From a training step to the first token under the new policy.", rounds=10)
    parser.add_argument(
        "config", nargs="?", default="quickstart", metavar="CONFIG", help="a TOML file, or the name of a shipped config"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
        help="override a value of the config; may be given several times",
    )  # fmt: skip
    parser.add_argument("--group", default="", metavar="NAME", help="which [[inference.group]], where there are some")
    parser.add_argument(
        "--in-flight", choices=get_args(InFlight), action="append", help="only this way (all that the engine offers)"
    )
    parser.add_argument("--requests", type=positive, default=16, help="in flight (%(default)s)")
    parser.add_argument("--pushes", type=positive, default=50, help="over all rounds (%(default)s)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from a push to the next (%(default)s)")
    return parser


if __name__ == "__main__":
    bench_main(main, parser())

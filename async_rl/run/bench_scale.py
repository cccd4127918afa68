"""`async-rl bench scale`: more nodes, and more shards of the buffer.

Every arm is a real run of the config, evaluation off, with another number of nodes or of shards, all processes on this
machine. In the first cell nodes are capped (inference.max_tokens_per_second), so that each stands for a machine of its
own until they together take what this one has; in the second they are not, and a batch is as large as for one shard.

    trajectories/s   accepted by the buffer, from the end of the warm-up to the last steps
    push             from the trainer's word of a policy until a node serves it (by relays where the config has them)
    messages         to and from the buffer that carry no trajectory, for each trajectory; statuses apart
    CPU              of the buffer's processes for each trajectory, and of the shard that took most
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.config import load_config
from async_rl.errors import AsyncRLError
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from async_rl.run.launch import child_environment, last_line
from async_rl.run.metrics import Record, read_metrics, steps_of
from async_rl.run.process import PARENT_VARIABLE
from async_rl.run.summary import percentile

WARM_UP = 3  # steps
RUN_TIMEOUT_S = 900.0
LOOK_S = 0.5  # how often the buffer's processes are looked at
NODES = (1, 2, 4, 8, 16)
SHARDS = (1, 2, 4)
SHARDED_NODES = 4
CAP = 400.0  # tokens a second and node: sixteen of these and a trainer are more than two cores take
SLOTS = 16

METRICS = (
    Metric("trajectories_per_s", "trajectories/s", "higher"),
    Metric("push_p50_ms", "push p50 ms", "lower"),
    Metric("push_p99_ms", "push p99 ms", "lower"),
    Metric("control_messages", "messages", "lower"),
    Metric("buffer_cpu_ms", "buffer CPU ms", "lower"),
    Metric("shard_cpu_ms", "busiest shard CPU ms", "lower"),
)


def measures_of(records: Sequence[Record], cpu_s: dict[str, float]) -> Measures:
    """From a run's metrics, and the CPU time that each shard's process has taken in all. Raises AsyncRLError when the
    run was too short for two looks at its pools."""
    steps = steps_of(records)
    start, end = steps[WARM_UP - 1]["time_s"], steps[-1]["time_s"]
    pools = [(record["time_s"], record["pools"]) for record in records if "pools" in record]
    looks = [each for each in pools if start <= each[0] <= end]
    if len(looks) < 2:
        raise AsyncRLError("the run was too short to see what its pools did: raise --steps")
    (began, first), (ended, last) = looks[0], looks[-1]
    results, control = (last["messages"][kind] - first["messages"].get(kind, 0) for kind in ("results", "control"))
    pushes = [value for _, look in pools for value in look["push_ms"]]
    everything = pools[-1][1]["messages"]["results"]
    cpu = {
        "buffer_cpu_ms": 1e3 * sum(cpu_s.values()) / everything,
        "shard_cpu_ms": 1e3 * max(cpu_s.values(), default=0.0) / everything,
    }
    return {
        "trajectories_per_s": results / (ended - began),
        "push_p50_ms": percentile(pushes, 50) or 0.0,
        "push_p99_ms": percentile(pushes, 99) or 0.0,
        "control_messages": control / max(1, results),
        **(cpu if cpu_s else {}),
    }


def run_once(config: str, overrides: Sequence[str]) -> Measures:
    """One real run, to its end. Raises AsyncRLError with the run's own last words when it fails."""
    with tempfile.TemporaryDirectory(prefix="async-rl-bench-") as scratch:
        out, log = Path(scratch) / "run", Path(scratch) / "log"
        settings = [f"--set={text}" for text in overrides]
        command = [sys.executable, "-P", "-m", "async_rl.run.cli", "run", config, "--out", str(out), *settings]
        environment = {key: value for key, value in child_environment().items() if key != PARENT_VARIABLE}
        cpu_s: dict[str, float] = {}
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as run:
            deadline = time.monotonic() + RUN_TIMEOUT_S
            try:
                while run.poll() is None:
                    if time.monotonic() > deadline:
                        raise AsyncRLError(f"a run took more than {RUN_TIMEOUT_S:g} s: {' '.join(overrides)}")
                    cpu_s |= shards_cpu_s(out)
                    time.sleep(LOOK_S)
            except BaseException:
                run.terminate()
                raise
        if run.returncode:
            raise AsyncRLError(f"the run failed ({' '.join(overrides)}): {last_line(log)}")
        return measures_of(read_metrics(out / "metrics.jsonl"), cpu_s)


def shards_cpu_s(run: Path, proc: Path = Path("/proc")) -> dict[str, float]:
    """CPU seconds so far of each of a run's buffer processes, by name; empty where there is no /proc."""
    found: dict[str, float] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if "buffer.service" in words and str(run) in words:
                fields = (folder / "stat").read_text().rpartition(") ")[2].split()
                ticks = int(fields[11]) + int(fields[12])  # utime and stime: proc(5) has them as 14 and 15, from 1
                found[words[words.index("--name") + 1]] = ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            continue  # it has ended meanwhile: what was seen of it last counts
    return found


def bench(options: argparse.Namespace, console: Console) -> None:
    nodes, shards = (options.nodes, options.shards) if not options.quick else (options.nodes[:1], options.shards[:2])
    steps = WARM_UP + 5 if options.quick else options.steps
    common = [
        f"run.steps={steps}", "run.eval_every=0", "trainer.checkpoint_every=0", f"inference.slots={SLOTS}",
        "algorithm.alarms.action=warn", *options.overrides,
    ]  # fmt: skip

    def arm(name: str, *settings: str) -> Arm:
        overrides = [*common, *settings]
        load_config(options.config, overrides)  # a mistake is reported before anything runs
        return Arm(name, lambda: run_once(options.config, overrides))

    capped = [
        arm(_count(count, "node"), f"inference.nodes={count}", f"inference.max_tokens_per_second={options.cap:g}")
        for count in nodes
    ]
    sharded = [
        arm(_count(count, "shard"), f"inference.nodes={SHARDED_NODES}", f"buffer.shards={count}") for count in shards
    ]
    cells = [
        Cell(f"{options.config}, {options.cap:g} tokens/s a node, one shard", capped, capped[0].name),
        Cell(f"{options.config}, {SHARDED_NODES} nodes without a cap", sharded, sharded[0].name),
    ]
    settings: dict[str, Any] = {"config": options.config, "overrides": common, "cap": options.cap}
    document = run_bench("scale", cells, METRICS, 1 if options.quick else options.rounds, settings, console)
    finish_bench(document, options, console)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected counts above 0, for example 1,2,4")
    return [int(part) for part in parts]


def main() -> None:
    parser = bench_parser("scale", "More nodes, and more shards of the buffer, by real runs.", rounds=3)
    parser.add_argument("config", nargs="?", default="quickstart", metavar="CONFIG")
    parser.add_argument("--steps", type=int, default=16, help="of each run (%(default)s)")
    parser.add_argument("--nodes", type=_counts, default=list(NODES), metavar="N,N,…", help="(1,2,4,8,16)")
    parser.add_argument("--shards", type=_counts, default=list(SHARDS), metavar="N,N,…", help="(1,2,4)")
    parser.add_argument("--cap", type=float, default=CAP, help="tokens a second of a capped node (%(default)g)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

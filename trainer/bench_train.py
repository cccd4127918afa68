"""`async-rl bench train`: what a training step costs in time and memory, by what of the model learns.

Dense AdamW, the baseline, moves every weight; LoRA an adapter's; a sketch the linear layers' own without their
gradients. All arms of a cell have the same random weights, kept in the same dtype, and the same batch; every
measurement is a process of its own (trainer.bench_train_arm). Steps are timed without what publishing takes.

Memory is that of the weights, of gradients (or sketches, and the signs of their projections), of the optimiser's state,
and of what the forward pass saves for the backward pass; and the peak in all during a step. On a CPU the peak is of
resident memory where every large tensor has a mapping of its own, which goes with it, in another process than time is
measured in, once; on a GPU it is what torch had allocated. "push" is the file of an ordinary version. An arm's number
is its rank, and "controlled" is with step control.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from rich.console import Console

from async_rl.config import TrainerConfig
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, positive, run_bench
from trainer.bench_process import measured_apart
from trainer.bench_train_arm import MB, Job, work
from trainer.bench_train_shapes import SHAPES, make_model
from trainer.kinds import KINDS
from trainer.push_sizes import push_sizes

Device = Literal["cpu", "cuda"]

TIMES = {
    "cpu_s": Metric("cpu_s", "CPU s a step", "lower"),
    "wall_s": Metric("wall_s", "s a step", "lower", 2),
    "tokens_per_s": Metric("tokens_per_s", "tokens/s", "higher"),
}
MEMORY = [
    Metric("weights_mib", "weights", "lower"),
    Metric("gradients_mib", "gradients", "lower"),
    Metric("optimiser_mib", "optimiser", "lower"),
    Metric("activations_mib", "activations", "lower"),
    Metric("peak_mib", "peak", "lower"),
    Metric("push_mb", "push MB", "lower"),
]
FIRST = {"cpu": ("cpu_s", "wall_s", "tokens_per_s"), "cuda": ("wall_s", "tokens_per_s", "cpu_s")}
"""A CPU is shared with other work, a GPU is not."""
ARM_TIMEOUT_S = 1800.0
BASELINE = "dense AdamW"


class Plan(NamedTuple):
    """What is measured: every shape in every dtype; trainer kinds, the baseline in any case; sketches of each rank, the
    first of which is the adapter's too."""

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: int


PLANS: dict[Device, Plan] = {
    "cpu": Plan(("quickstart", "512x4"), ("float32", "bfloat16"), tuple(KINDS), (16, 64), steps=3),
    "cuda": Plan(("1.5b", "7b", "27b"), ("bfloat16", "float32"), tuple(KINDS), (64, 256), steps=5),
}
QUICK = Plan(("tiny",), ("float32", "bfloat16"), tuple(KINDS), (4,), steps=1)


class Measure:
    """Measures a job: its time each time, and its memory, which does not vary, once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._again = False

    def __call__(self) -> Measures:
        if self._job.device == "cuda":
            return self._run("time", "memory")
        measures = self._run("time")
        if not self._again:
            measures |= self._run("memory")
            self._again = True
        return measures

    def _run(self, *measures: Literal["time", "memory"]) -> Measures:
        job = msgspec.structs.replace(self._job, measures=measures)
        return measured_apart(partial(work, job), ARM_TIMEOUT_S, job, start="spawn" if job.device == "cuda" else "fork")


def cells(plan: Plan, device: Device, threads: int = 1, memory_gib: float = 0.0) -> list[Cell]:
    common = {"device": device, "threads": threads, "memory_gib": memory_gib, "steps": plan.steps, "measures": ()}
    return [_cell(plan, shape, dtype, common) for shape, dtype in product(plan.shapes, plan.dtypes)]


def _cell(plan: Plan, name: str, dtype: str, common: dict[str, Any]) -> Cell:
    rank, shape = plan.ranks[0], SHAPES[name]
    arms: dict[str, dict[str, Any]] = {BASELINE: {"kind": "full"}, f"LoRA {rank}": {"kind": "lora"}}
    arms |= {f"sketch {each}": {"kind": "sketch", "rank": each} for each in plan.ranks}
    if shape.controlled:
        arms[f"sketch {rank}, controlled"] = {"kind": "sketch", "controlled": True}
    common = common | {"shape": name, "dtype": dtype, "rank": rank, "controlled": False}
    jobs = {arm: Job(**common | own) for arm, own in arms.items() if arm == BASELINE or own["kind"] in plan.kinds}
    sizes = push_sizes(make_model(shape, dtype, torch.device("meta")), TrainerConfig(rank=rank))
    about = (
        f"{name}, {dtype}: {shape.attempts} × {shape.tokens} tokens"
        f"{', activations checkpointed' if shape.checkpointed else ''}; all weights are {_mb(sizes.full)} MB, an "
        f"adapter of rank {rank} {_mb(sizes.adapter)} MB; memory in MiB"
    )
    return Cell(about, [Arm(arm, Measure(job)) for arm, job in jobs.items()], baseline=BASELINE)


def _mb(size: int) -> str:
    return f"{size / MB:,.0f}" if size >= 1000 * MB else f"{size / MB:.4g}"


def with_remarks(document: dict[str, Any]) -> dict[str, Any]:
    """Below each cell, what its arms keep as parts of what the baseline keeps."""
    for cell in document["cells"]:
        base = cell["arms"][cell["baseline"]]
        cell["remarks"] = [
            _shares(arm, values, base)
            for arm, values in cell["arms"].items()
            if values is not base and values.get("peak_mib") and base.get("peak_mib")
        ]
    return document


def _shares(arm: str, values: dict[str, list[float]], base: dict[str, list[float]]) -> str:
    def of(*keys: str) -> float:
        return sum(values[key][0] for key in keys) / sum(base[key][0] for key in keys)

    return (
        f"{arm}: gradients and optimiser 1/{1 / of('gradients_mib', 'optimiser_mib'):.1f} of the baseline's, "
        f"activations {of('activations_mib'):.2f}, peak {of('peak_mib'):.2f}, push 1/{1 / of('push_mb'):.1f}"
    )


def bench(options: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(1)  # before any process is forked
    plan, rounds = (QUICK, 1) if options.quick else (PLANS[options.device], options.rounds)
    given = {key: getattr(options, key) for key in Plan._fields if getattr(options, key)}
    plan = plan._replace(**given)
    settings = {"device": options.device, "threads": options.threads, "memory_gib": options.memory_gib}
    metrics = [*(TIMES[key] for key in FIRST[options.device]), *MEMORY]
    measured = cells(plan, options.device, options.threads, options.memory_gib)
    document = run_bench("train", measured, metrics, rounds, settings | plan._asdict(), console)
    if options.device == "cuda":
        document["machine"]["gpu"] = torch.cuda.get_device_name()
    finish_bench(with_remarks(document), options, console)


def main() -> None:
    parser = bench_parser("train", "A training step of AdamW, LoRA and sketches: time, memory by part, push.", rounds=5)
    parser.add_argument("--device", choices=PLANS, default="cpu", help="where (%(default)s)")
    parser.add_argument("--shapes", type=_names(SHAPES), metavar="A,B", help=f"models: {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", type=_names(("float32", "bfloat16")), metavar="A,B", help="float32, bfloat16")
    parser.add_argument("--kinds", type=_names(KINDS), metavar="A,B", help=f"beside the baseline: {', '.join(KINDS)}")
    parser.add_argument("--ranks", type=_ranks, metavar="R,S", help="of sketches; the first is the adapter's too")
    parser.add_argument("--steps", type=positive, help="timed in each measurement")
    parser.add_argument("--threads", type=positive, default=1, help="of torch on the CPU (%(default)s)")
    parser.add_argument(
        "--memory-gib", type=float, default=0.0, metavar="GIB", help="use no more than this: what a smaller GPU can do"
    )
    bench_main(bench, parser)


def _names(known: Any) -> Any:
    """A parser of names with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(positive(each) for each in text.split(","))


if __name__ == "__main__":
    main()

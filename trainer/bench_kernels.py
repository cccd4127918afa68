"""`async-rl bench kernels`: the three operations of a sketched layer against the machine's own ceiling.

Of each operation two things bound the time: the bytes it has to move, and the products it has to form. Both are
measured here, as a copy of as many bytes and as a plain product of matrices of the same shapes (without signs to draw,
without whole numbers to keep), and the slower one is the ceiling: the baseline. So a ratio is the share of the ceiling
that is reached. Beside it what torch does when bits do not matter: addmm into the weight, from a projection that is
stored. On a GPU the house's arms are Triton's kernels, on a CPU torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console

from async_rl.errors import AsyncRLError
from async_rl.policy.factors import apply_, encode
from async_rl.policy.projection import projection_key, signs
from async_rl.policy.rounding import rounding_key
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from trainer.kernels.sketching import accumulate_, project

METRICS = [
    Metric("ms", "ms", "lower"),
    Metric("gb_s", "GB/s", "higher"),
    Metric("tflop_s", "TFLOP/s", "higher"),
]
KEY = projection_key(0, 1, "layer")
ROUNDING = rounding_key(0, 1, "layer")
LEAST_S = 0.3  # a measurement lasts at least this, and CALLS calls
CALLS = 5


class Shape(NamedTuple):
    """A layer of [rows, columns], sketched at `rank` over `tokens` tokens of a micro-batch."""

    rows: int
    columns: int
    rank: int
    tokens: int


class Operation(NamedTuple):
    """`arms` by name; all move `size` bytes and take `products` multiply-adds, and `product` is the plain one."""

    name: str
    size: int
    products: int
    product: Callable[[], object]
    arms: dict[str, Callable[[], object]]


def seconds(call: Callable[[], object], device: torch.device, least: float) -> float:
    """The median time of a call: of the clock with the device's work included, or on a CPU the process's own, which
    other processes of the machine move less."""
    times: list[float] = []
    call()
    while len(times) < CALLS or sum(times) < least:
        start = _now(device)
        call()
        times.append(_now(device) - start)
    return median(times)


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def operations(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Operation]:
    """Applying a change, projecting activations, adding to a sketch, all with tensors of `dtype`."""
    rows, columns, rank, tokens = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    weight, x, gradient = normal(rows, columns), normal(tokens, columns), normal(tokens, rows)
    change = encode(normal(rows, rank).float() * 1e-4)
    sign = signs(KEY, rank, 0, columns, device)
    stored, small, projected = sign.to(dtype), normal(rows, rank) * 1e-6, normal(tokens, rank)
    sketch = torch.zeros(rows, rank, device=device)
    rounding = ROUNDING if dtype == torch.bfloat16 else None
    item = dtype.itemsize
    return [
        Operation(
            "apply",
            2 * rows * columns * item,
            rows * columns * rank,
            plain(small, stored),
            {
                "addmm, inexact": lambda: weight.addmm_(small, stored, alpha=-1),
                "exact": lambda: apply_(weight, change, KEY, rounding=rounding),
            },
        ),
        Operation(
            "project",
            (tokens * columns + tokens * rank) * item,
            tokens * columns * rank,
            plain(x, stored.T),
            {"signs drawn": lambda: project(x, KEY, rank, lambda: signs(KEY, rank, 0, columns, device))},
        ),
        Operation(
            "accumulate",
            (tokens * rows + tokens * rank) * item + 2 * rows * rank * 4,
            tokens * rows * rank,
            plain(gradient.T, projected),
            {"in float32": lambda: accumulate_(sketch, gradient, projected, 1.0)},
        ),
    ]


def plain(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """a · b into memory that has been written before: a first touch of fresh pages takes longer than the product."""
    out = a @ b
    return lambda: torch.mm(a, b, out=out)


def cells(shape: Shape, device: torch.device, least: float) -> list[Cell]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for operation in operations(shape, dtype, device):
            name = f"{operation.name}, {str(dtype).removeprefix('torch.')}"
            arms = [Arm("ceiling", partial(ceiling, operation, device, least))]
            arms += [
                Arm(arm, partial(measured, operation, call, device, least)) for arm, call in operation.arms.items()
            ]
            found.append(Cell(name, arms, baseline="ceiling"))
    return found


def measured(operation: Operation, call: Callable[[], object], device: torch.device, least: float) -> Measures:
    took = seconds(call, device, least)
    return {
        "ms": 1e3 * took,
        "gb_s": operation.size / took / 1e9,
        "tflop_s": 2 * operation.products / took / 1e12,
    }


def ceiling(operation: Operation, device: torch.device, least: float) -> Measures:
    """The slower of a copy of the bytes and the plain product."""
    source = torch.ones(operation.size // 8, device=device)  # float32; read once and written once
    target = torch.empty_like(source)
    copied = measured(operation, lambda: target.copy_(source), device, least)
    return max(copied, measured(operation, operation.product, device, least), key=lambda measures: measures["ms"])


def bench(options: argparse.Namespace, console: Console) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise AsyncRLError("--device cuda: torch sees no GPU here; leave it out to measure on the CPU")
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = Shape(options.rows, options.columns, options.rank, options.tokens)
    rounds, least = options.rounds, LEAST_S
    if options.quick:
        shape, rounds, least = Shape(64, 128, 8, 32), 1, 0.0
    settings = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, 1 thread", **shape._asdict()}
    finish_bench(
        run_bench("kernels", cells(shape, device, least), METRICS, rounds, settings, console), options, console
    )


def main() -> None:
    parser = bench_parser("kernels", "Products with a drawn projection, and the exact application.", rounds=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("rows", 4096), ("columns", 4096), ("rank", 64), ("tokens", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

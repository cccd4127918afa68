"""`async-rl bench packing`: what a training step costs in time and memory, packed against padded.

One batch of attempts with log-normal lengths, drawn from a seed, and one model. The baseline puts all of them into one
micro-batch padded to the longest; beside it, padded micro-batches sorted by length, of as many tokens as the batch has
without padding; and packed ones. A second cell compares the logits of a large vocabulary, all at once and in chunks.

Every measurement is a process of its own (`trainer.bench_packing_arm`), because memory that one arm used stays with
its process. "Resident" is the peak of resident memory during the first whole step, above what the loaded model takes.
Of that, malloc keeps a part that tensors have given back; so another process measures the same where every large tensor
has a mapping of its own, which goes when the tensor goes: "tensors", nearer to what a GPU would need. "Share" is that
of the baseline's in the same round. All arms write the gradient they found, and the last column is the largest
difference of any entry to the baseline's, of the largest entry.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_rl.errors import AsyncRLError
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from trainer.bench_packing_arm import Job, work
from trainer.bench_process import measured_apart

METRICS = [
    Metric("cpu_s", "CPU seconds a step", "lower"),
    Metric("wall_s", "seconds a step", "lower"),
    Metric("resident_mib", "resident MiB", "lower"),
    Metric("resident_share", "share", "lower", 2),
    Metric("tensors_mib", "tensors MiB", "lower"),
    Metric("tensors_share", "share", "lower", 2),
    Metric("gradient_gap", "gradient ±", "lower", 2),
]
ARM_TIMEOUT_S = 300.0
SIGMA = 0.8  # of the lengths' logarithm
SHARE = 0.4  # mean / longest, at most
UNLIMITED = 1 << 40  # tokens in a micro-batch


class Scale(NamedTuple):
    """Attempts of up to `longest` tokens; `hidden` and `layers` of the model, and its two vocabularies."""

    attempts: int
    longest: int
    hidden: int
    layers: int
    vocabulary: int
    large_vocabulary: int
    steps: int


FULL = Scale(attempts=32, longest=384, hidden=256, layers=4, vocabulary=2048, large_vocabulary=16384, steps=1)
QUICK = Scale(attempts=32, longest=64, hidden=64, layers=2, vocabulary=256, large_vocabulary=2048, steps=1)


def lengths(attempts: int, longest: int, seed: int) -> list[int]:
    """Log-normal, scaled so that the longest has `longest` tokens, at least 16. Raises AsyncRLError for a seed that
    gives a mean above SHARE of the longest: padding then costs less than what is to be measured."""
    drawn = np.random.default_rng(seed).lognormal(0.0, SIGMA, attempts)
    scaled = np.maximum(16, np.rint(drawn / drawn.max() * longest)).astype(int)
    if scaled.mean() > SHARE * longest:
        raise AsyncRLError(
            f"--seed {seed}: the mean of the lengths is {scaled.mean() / longest:.2f} of the longest, above {SHARE}: "
            "choose another"
        )
    return [int(length) for length in scaled]


def write_model(folder: Path, scale: Scale, vocabulary: int) -> Path:
    """A random Qwen3, the same every time."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=scale.hidden,
            intermediate_size=3 * scale.hidden,
            num_hidden_layers=scale.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=scale.hidden // 4,
            max_position_embeddings=scale.longest,
            tie_word_embeddings=False,
        )
    )
    path = folder / f"model-{vocabulary}"
    model.save_pretrained(path)
    return path


def measure(job: Job, reference: Path) -> Measures:
    """Run a job as two processes; its gradient is compared with `reference`, which the baseline writes first."""
    whole, tensors = run(job), run(msgspec.structs.replace(job, steps=0, mapped=True))
    gradient, expected = (np.fromfile(path, np.float32) for path in (job.gradient, reference))
    return {
        "cpu_s": whole["cpu_s"],
        "wall_s": whole["wall_s"],
        "resident_mib": whole["peak_mib"],
        "tensors_mib": tensors["peak_mib"],
        "gradient_gap": float(np.abs(gradient - expected).max() / np.abs(expected).max()),
    }


def run(job: Job) -> Measures:
    """The measures of one process. Raises AsyncRLError with what went wrong there."""
    return measured_apart(partial(work, job), ARM_TIMEOUT_S, job)


def cells(folder: Path, scale: Scale, seed: int) -> list[Cell]:
    drawn = lengths(scale.attempts, scale.longest, seed)

    def cell(name: str, vocabulary: int, arms: dict[str, dict[str, Any]]) -> Cell:
        model = str(write_model(folder, scale, vocabulary))
        jobs = {
            arm: Job(model=model, lengths=drawn, vocabulary=vocabulary, steps=scale.steps,
                     gradient=str(folder / f"{vocabulary}-{number}.f32"), **options)
            for number, (arm, options) in enumerate(arms.items())
        }  # fmt: skip
        first = next(iter(jobs))
        reference = Path(jobs[first].gradient)
        return Cell(name, [Arm(arm, partial(measure, job, reference)) for arm, job in jobs.items()], baseline=first)

    real = sum(drawn)
    batch = f"{scale.attempts} attempts of {min(drawn)} to {max(drawn)} tokens, mean {real / len(drawn):.0f}"
    return [
        cell(
            f"{batch}; vocabulary {scale.vocabulary}",
            scale.vocabulary,
            {
                "padded to the longest": {"packing": "never", "budget": UNLIMITED},
                "padded, sorted": {"packing": "never", "budget": real},
                "packed": {"budget": UNLIMITED},
                "packed, checkpointed": {"budget": UNLIMITED, "checkpointed": True},
            },
        ),
        cell(
            f"the same packed; vocabulary {scale.large_vocabulary}",
            scale.large_vocabulary,
            {"all logits at once": {"budget": UNLIMITED, "chunked": False}, "in chunks": {"budget": UNLIMITED}},
        ),
    ]


def with_shares(document: dict[str, Any]) -> dict[str, Any]:
    """Each arm's peaks as shares of its baseline's in the same round."""
    for cell in document["cells"]:
        for kind in ("resident", "tensors"):
            base = cell["arms"][cell["baseline"]][f"{kind}_mib"]
            for values in cell["arms"].values():
                values[f"{kind}_share"] = [a / b for a, b in zip(values[f"{kind}_mib"], base, strict=True)]
    return document


def bench(options: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(1)  # before any process is forked
    disable_progress_bar()
    scale, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    with tempfile.TemporaryDirectory(prefix="async-rl-bench-") as folder:
        measured = cells(Path(folder), scale, options.seed)
        settings = {"seed": options.seed, "sigma": SIGMA, "threads": 1, **scale._asdict()}
        document = run_bench("packing", measured, METRICS, rounds, settings, console)
    finish_bench(with_shares(document), options, console)


def main() -> None:
    parser = bench_parser("packing", "A training step, packed against padded: time, peak memory, gradient.", rounds=3)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (%(default)s)")
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

"""What ranks of the Megatron backend take of memory, beside what `trainer.megatron.memory` estimates of them:

    python -m trainer.megatron.measure_memory --json docs/bench/memory.json

For each shape and layout a model of random weights is written, and every rank is a process of its own on CPUs. Measured
is the peak of resident memory over a whole step (micro-batches through the pipeline, gradients summed, AdamW), above
what the process takes after the same was done with a model a hundredth the size and forgotten: libraries, their
buffers and code. Every large tensor has a mapping of its own meanwhile (`trainer.bench_memory`), so that memory is
resident no longer than its tensor is. Models are float32: products of bfloat16 on CPUs have buffers of their own. What
layers keep in bfloat16 is counted in tests/megatron/test_kept_activations.py. Tokens are sent to all experts alike, by
router replay, as the estimate has it. The figure of a layout is that of its fullest rank.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.run.bench import Arm, Cell, Measures, Metric, bench_main, bench_parser, finish_bench, run_bench
from async_rl.run.launch import child_environment
from trainer.bench_memory import MIB, map_large_tensors, process_bytes, start_of_peak
from trainer.logprobs import Rows, packed_rows
from trainer.megatron.memory import estimate
from trainer.megatron.shape import shape_in

METRICS = [Metric("mib", "MiB of the fullest rank", "higher", 4)]
TIMEOUT_S = 400.0  # for the ranks of one layout
END_S = 5.0  # for a process that was killed
SEQUENCE_TOKENS = 768  # more than attention computes in blocks
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


class Case(msgspec.Struct, frozen=True):
    """A model and how it is trained; `config` are fields of its config.json."""

    name: str
    config: dict[str, Any]
    trainer: TrainerConfig


def case(
    name: str, layers: int, parallel: ParallelConfig, tokens: int, *, experts: bool = False, recompute: bool = False
) -> Case:
    config = SHAPE | {"num_hidden_layers": layers} | (EXPERTS if experts else {})
    trainer = TrainerConfig(
        backend="megatron", parallel=parallel, micro_batch_tokens=tokens, activation_checkpointing=recompute
    )
    return Case(name, config, trainer)


CASES = (
    case("dense", 4, ParallelConfig(), 1536),
    case("dense, 2 stages, layers computed again", 8, ParallelConfig(pipeline=2), 2304, recompute=True),
    case("experts on 2 ranks", 4, ParallelConfig(data=2, expert=2), 768, experts=True),
    case("experts and tokens on 2 ranks, layers computed again", 4, ParallelConfig(tensor=2, expert=2, sequence=True),
         2304, experts=True, recompute=True),
)  # fmt: skip


# --- all of a layout's ranks -----------------------------------------------------------------------------------------


def estimated(case: Case, folder: Path) -> Measures:
    """In MiB, of the fullest rank."""
    found = estimate(shape_in(write_model(case, folder) / "config.json"), case.trainer, "float32", replays=True)
    return {"mib": found.largest.total / MIB}


def measured(case: Case, folder: Path) -> Measures:
    """In MiB, of the fullest rank. Raises AsyncRLError when one of them fails."""
    path, ranks = write_model(case, folder), case.trainer.parallel.ranks
    environment = child_environment() | {
        "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "GLOO_SOCKET_IFNAME": "lo"
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        command = [sys.executable, "-P", "-m", "trainer.megatron.measure_memory", "--case", case.name]
        processes = []
        for rank in range(ranks):
            with open(Path(meeting) / f"log-{rank}", "wb") as log:
                arguments = [*command, "--folder", str(path), "--meeting", meeting, "--rank", str(rank)]
                processes.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=log))
        try:
            _wait(processes, Path(meeting), case.name)
        finally:
            for process in processes:
                process.kill()
                process.wait(END_S)
        peaks = [int((Path(meeting) / f"bytes-{rank}").read_text()) for rank in range(ranks)]
    return {"mib": max(peaks) / MIB}


def _wait(processes: list[subprocess.Popen[bytes]], meeting: Path, name: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise AsyncRLError(f"{name}: its ranks are not done within {TIMEOUT_S:g} s")
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.poll():
            said = (meeting / f"log-{rank}").read_text().strip()
            raise AsyncRLError(f"{name}: rank {rank} failed: {said[-2000:]}")


def write_model(case: Case, folder: Path, *, small: bool = False) -> Path:
    """The case's model with random weights, once; `small`: of one narrow layer for each stage."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    path = folder / case.name.replace(" ", "-").replace(",", "") / ("small" if small else "model")
    if not path.exists():
        changes: dict[str, Any] = {}
        if small:
            changes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": case.trainer.parallel.pipeline}
        kind = Qwen3MoeConfig if "num_experts" in case.config else Qwen3Config
        AutoModelForCausalLM.from_config(kind(**(case.config | changes))).save_pretrained(path)
    return path


# --- one rank --------------------------------------------------------------------------------------------------------


def run_rank(case: Case, path: Path, meeting: Path, rank: int) -> None:
    """Writes the bytes that this rank's peak of a step is above what its process takes for anything."""
    from trainer.megatron import groups

    torch.set_num_threads(1)
    parallel = case.trainer.parallel
    store = dist.FileStore(str(meeting / "store"), parallel.ranks)
    waiting = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=parallel.ranks, timeout=waiting)
    map_large_tensors()
    groups.begin(parallel, CPU)
    _steps(case, path.parent / "small", tokens=64)
    gc.collect()
    before = process_bytes("VmRSS")
    peak = _steps(case, path, tokens=case.trainer.micro_batch_tokens)
    (meeting / f"bytes-{rank}").write_text(str(peak - before))
    dist.barrier()


def _steps(case: Case, path: Path, tokens: int) -> int:
    """A short step, so that AdamW has its moments, and a whole one, whose peak of resident memory is returned."""
    from trainer.megatron.learnable import LoraShards
    from trainer.megatron.model import build

    trainer = case.trainer
    model = build(path, trainer.parallel, dtype=torch.float32, device=CPU, recompute=trainer.activation_checkpointing)
    learnable = LoraShards(model, trainer, 0, str(path))
    _step(case, model, learnable, 64)
    gc.collect()
    dist.barrier()
    start_of_peak()
    _step(case, model, learnable, tokens)
    return process_bytes("VmHWM")


def _step(case: Case, model: Any, learnable: Any, tokens: int) -> None:
    from trainer.megatron import passes

    count = case.trainer.parallel.pipeline + 1  # as many as may be in flight, and one more
    batches = [micro_batch(case.config, tokens) for _ in range(count)]
    learnable.zero()
    passes.run(model, batches, lambda index, logprobs: logprobs.sum(), temperature=1.0, learns=True)
    learnable.move(learnable.norm(), 1e-4)


def micro_batch(config: dict[str, Any], tokens: int) -> Rows:
    """So many tokens to compute, in sequences of SEQUENCE_TOKENS or as many as there are; to experts in turn."""
    length = min(tokens, SEQUENCE_TOKENS)
    sequences = [np.arange(length + 1, dtype=np.int32) % config["vocab_size"]] * (tokens // length)
    routes = None
    if "num_experts" in config:
        layers, each, experts = (config[key] for key in ("num_hidden_layers", "num_experts_per_tok", "num_experts"))
        turn = np.arange(length + 1)[:, None, None] * each + np.arange(layers)[:, None] + np.arange(each)
        routes = (turn % experts).astype(np.int16)
    wanted = [np.arange(1, length + 1)] * len(sequences)
    return packed_rows(sequences, wanted, CPU, [routes] * len(sequences) if routes is not None else ())


# --- the command -----------------------------------------------------------------------------------------------------


def bench(options: argparse.Namespace, console: Console) -> None:
    if options.rank is not None:
        (chosen,) = (each for each in CASES if each.name == options.case)
        run_rank(chosen, options.folder, options.meeting, options.rank)
        return
    cases = CASES[:1] if options.quick else CASES
    with tempfile.TemporaryDirectory(prefix="async-rl-memory-") as folder:
        for each in cases:
            write_model(each, Path(folder), small=True)
        arms = {"measured": measured, "estimated": estimated}
        cells = [
            Cell(each.name, [Arm(name, partial(arm, each, Path(folder))) for name, arm in arms.items()], "measured")
            for each in cases
        ]
        settings = {"cases": [msgspec.to_builtins(each) for each in cases], "sequence_tokens": SEQUENCE_TOKENS}
        document = run_bench("memory", cells, METRICS, 1 if options.quick else options.rounds, settings, console)
    finish_bench(document, options, console)


def main() -> None:
    parser = bench_parser("memory", "The memory estimate beside what ranks take; a ratio of 1 is best.", rounds=1)
    parser.prog = "python -m trainer.megatron.measure_memory"
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    for name in ("--folder", "--meeting"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    bench_main(bench, parser)


if __name__ == "__main__":
    main()

"""One measurement of `async-rl bench train`: a process makes a model, takes training steps, and says what they cost."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.run.bench import Measures, Unmeasured
from async_rl.trainer_config import StepControlConfig, peak_rate
from trainer.backend import Sample
from trainer.bench_memory import (
    GIB,
    MIB,
    is_out_of_memory,
    kept,
    limit_memory,
    map_large_tensors,
    process_bytes,
    saved_activations,
    start_of_peak,
)
from trainer.bench_packing_arm import batch
from trainer.bench_train_shapes import SHAPES, Shape, make_model, weight_bytes
from trainer.model_loading import resolve_device
from trainer.sketch.weights import SketchWeights
from trainer.torch_backend import TorchBackend

MB = 1_000_000
NOBODYS = "0" * 64  # a digest of weights that nobody receives


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Take `steps` steps of a trainer kind on a shape whose weights are kept in `dtype`, after what is done once.
    `measures`: "time", "memory", or both, which only a GPU can in one process. `memory_gib`, if above 0, is all that
    may be used."""

    shape: str
    dtype: str
    kind: Literal["full", "lora", "sketch"]
    rank: int
    controlled: bool
    steps: int
    device: Literal["cpu", "cuda"]
    measures: tuple[Literal["time", "memory"], ...]
    threads: int = 1
    memory_gib: float = 0.0

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            kind=self.kind,
            rank=self.rank,
            activation_checkpointing=SHAPES[self.shape].checkpointed,
            step_control=StepControlConfig() if self.controlled else None,
        )


def work(job: Job) -> Measures:
    """What the process does. Raises Unmeasured when memory does not suffice."""
    logging.getLogger("trainer").setLevel(logging.ERROR)  # what a step of random weights loses is of no interest
    torch.set_num_threads(job.threads)
    device = resolve_device(job.device)
    if job.memory_gib:
        limit_memory(device, int(job.memory_gib * GIB))
    try:
        return _work(job, device)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
    raise Unmeasured(_does_not_fit(job, device))


def _work(job: Job, device: torch.device) -> Measures:
    on_cpu = device.type == "cpu"
    if on_cpu and "memory" in job.measures:
        map_large_tensors()
        first = Trial(msgspec.structs.replace(job, shape="tiny", steps=0), device)  # what libraries set up once
        first.step()
        del first
    before = start_of_peak() if on_cpu else 0
    trial = Trial(job, device)
    trial.step()  # makes the optimiser's state, and on a GPU compiles kernels
    measures: Measures = {}
    if "memory" in job.measures:
        measures |= _memory(trial, before)
    if "time" in job.measures:
        measures |= _time(trial, job.steps)
    return measures


class Trial:
    """A backend on random weights and its batch."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.shape: Shape = SHAPES[job.shape]
        self.device = device
        self.kind = job.kind
        self.rate = peak_rate(job.trainer)
        self.backend = TorchBackend(
            job.shape,
            trainer=job.trainer,
            algorithm=AlgorithmConfig(ratio_level="token", treatment="truncate"),
            temperature=1.0,
            seed=0,
            dtype=job.dtype,
            device=job.device,
            steps=job.steps + 2,
            model=make_model(self.shape, job.dtype, device),
        )
        if isinstance(self.backend.learnable, SketchWeights):
            # Once in a run all weights are read for the digest from which updates start: minutes for the largest.
            self.backend.learnable.chain.restore((NOBODYS, None, ()))
        self.samples: Sequence[Sample] = batch([self.shape.tokens] * self.shape.attempts, self.shape.vocabulary)

    def step(self) -> None:
        """Raises AsyncRLError when nothing was learned: that would have cost less."""
        result = self.backend.step(self.samples, self.rate)
        if result.skipped:
            raise AsyncRLError(f"{self.kind}: the step was skipped, so there is nothing to measure")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def push_bytes(self) -> int:
        """Of a version after this step. A version's file is written even where only its size is known: a trainer
        forgets the step with it."""
        if self.kind == "full":
            return self.backend.push_sizes.full  # a snapshot
        with tempfile.TemporaryDirectory(prefix="async-rl-bench-") as folder:
            path = Path(folder) / "policy.safetensors"
            self.backend.export(path)
            return path.stat().st_size

    def forward(self) -> torch.Tensor:
        """Log-probabilities of all that trains, of the whole batch at once."""
        scorer = self.backend.scorer
        wanted = [np.flatnonzero(sample.mask == 0) for sample in self.samples]
        rows = scorer.rows([sample.tokens for sample in self.samples], wanted)
        return scorer.logprobs(rows, 1.0)


def _memory(trial: Trial, before: int) -> Measures:
    """What is kept, and the peak during another step: on a CPU above the `before` bytes that were resident before the
    model was there."""
    trial.push_bytes()
    if trial.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trial.device)
        trial.step()
        peak = torch.cuda.max_memory_allocated(trial.device)
    else:
        start_of_peak()
        trial.step()
        peak = process_bytes("VmHWM") - before
    push = trial.push_bytes()
    parts = kept(trial.backend.model, trial.backend.learnable)
    return {
        "weights_mib": parts.weights / MIB,
        "gradients_mib": parts.gradients / MIB,
        "optimiser_mib": parts.optimiser / MIB,
        "activations_mib": saved_activations(trial.backend.model, trial.forward) / MIB,
        "peak_mib": peak / MIB,
        "push_mb": push / MB,
    }


def _time(trial: Trial, steps: int) -> Measures:
    """Of steps alone: what publishing takes is not a step's."""
    wall = cpu = 0.0
    for _ in range(steps):
        trial.push_bytes()
        start, start_cpu = time.perf_counter(), time.process_time()
        trial.step()
        wall, cpu = wall + time.perf_counter() - start, cpu + time.process_time() - start_cpu
    tokens = trial.shape.attempts * trial.shape.tokens
    return {"cpu_s": cpu / steps, "wall_s": wall / steps, "tokens_per_s": tokens * steps / wall}


def _does_not_fit(job: Job, device: torch.device) -> str:
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
    else:
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has_gib = min(has / GIB, job.memory_gib or has / GIB)
    weights = weight_bytes(SHAPES[job.shape], job.dtype) / GIB
    alone = "weights alone" if job.kind != "full" else "weights, their gradients and two moments alone"
    needs = weights if job.kind != "full" else 4 * weights
    return (
        f"does not fit: needs more than the {has_gib:.4g} GiB that the device has or may use; {alone} are "
        f"{needs:.4g} GiB"
    )

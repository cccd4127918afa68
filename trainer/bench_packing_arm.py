"""One measurement of `async-rl bench packing`: a process loads a model, trains on a batch, and says what that cost."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.run.bench import Measures
from trainer.backend import Sample
from trainer.bench_memory import MIB, map_large_tensors, process_bytes, start_of_peak
from trainer.torch_backend import TorchBackend


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Measure `steps` steps, after the one whose memory is measured, on attempts of these `lengths` with at
    most `budget` tokens a micro-batch, and write the gradient to the file `gradient` (float32, as they are)."""

    model: str
    lengths: list[int]
    vocabulary: int
    steps: int
    gradient: str
    budget: int
    packing: Literal["auto", "never"] = "auto"
    checkpointed: bool = False
    chunked: bool = True
    mapped: bool = False
    """Every large tensor has a mapping of its own, so that memory is resident no longer than a tensor needs it."""


def batch(lengths: list[int], vocabulary: int) -> list[Sample]:
    """Random attempts; all but the first quarter of each was sampled."""
    random = np.random.default_rng(0)
    samples = []
    for index, length in enumerate(lengths):
        mask = (np.arange(length) < max(1, length // 4)).astype(np.uint8)
        behaviour = np.where(mask == 0, -np.log(vocabulary), 0).astype(np.float32)
        empty: dict[str, Any] = {name: np.zeros(length, np.int32) for name in _PER_TOKEN}
        samples.append(
            Sample(
                tokens=random.integers(0, vocabulary, length).astype(np.int32),
                behaviour=behaviour,
                mask=mask,
                advantage=float(random.normal()),
                attempt=index,
                group=index // 8,
                **empty,
            )
        )
    return samples


_PER_TOKEN = set(Sample._fields) - {"tokens", "behaviour", "mask", "advantage", "attempt", "group"}


def work(job: Job) -> Measures:
    """What the process does."""
    if job.mapped:
        map_large_tensors()
    trainer = TrainerConfig(
        # Without these the optimiser's first moment is the gradient, and that is how the gradient is read.
        beta1=0.0,
        max_grad_norm=1e30,
        micro_batch_tokens=job.budget,
        packing=job.packing,
        activation_checkpointing=job.checkpointed,
    )
    algorithm = AlgorithmConfig(ratio_level="token", treatment="truncate")
    backend = TorchBackend(job.model, trainer=trainer, algorithm=algorithm, temperature=1.0, seed=0, device="cpu")
    if backend.scorer.packed != (job.packing == "auto"):
        raise AsyncRLError(f"{job.model}: its sequences cannot be packed, so there is nothing to compare")
    backend.scorer.chunked = job.chunked
    _fill(backend)
    backend.step(batch([16, 24], job.vocabulary), 0.0)  # what libraries set up once is not a step's
    samples = batch(job.lengths, job.vocabulary)
    before = start_of_peak()
    backend.step(samples, 0.0)
    peak = process_bytes("VmHWM") - before
    states = [
        backend.learnable.optimizer.state[parameter]["exp_avg"] for parameter in backend.learnable.parameters.values()
    ]
    torch.cat([state.flatten() for state in states]).numpy().tofile(job.gradient)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(job.steps):
        backend.step(samples, 0.0)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    each = max(1, job.steps)
    return {"cpu_s": cpu / each, "wall_s": wall / each, "peak_mib": peak / MIB}


def _fill(backend: TorchBackend) -> None:
    """A fresh adapter's B is zero, and so is then the gradient of A."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in backend.learnable.parameters.values():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))

"""The training half of `async-rl bench staleness`: runs of the real backend on batches of an exact age.

The lag is imposed by a queue: `lag` batches of version 0 lie in it when training begins, and each policy that is made
samples one more at its end. So the update from version v trains what version max(0, v - lag) sampled; the stamps on
the tokens are the engine's, and `prepare` refuses what is older. With `reuse` = R each batch trains R times in a row
against the log-probabilities that it was sampled with.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import msgspec
import torch

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.bench_staleness_cells import (
    Cell,
    Outcome,
    Sampled,
    SampleOrder,
    Scale,
    Task,
    evaluated_at,
    overrides_of,
)
from async_rl.run.launch import child_environment
from async_rl.run.model_cache import model_path
from async_rl.run.pipes import Child, take_over_pipes
from async_rl.run.process import follow_parent
from async_rl.trajectory import decode_trajectory
from async_rl.wire.link import Received
from async_rl.wire.messages import Batch, BatchGroup, Lease, SamplingParams
from trainer.alarms import Alarms
from trainer.backend import Backend, StepResult
from trainer.backends import make_backend
from trainer.batches import TrainingBatch, prepare
from trainer.schedule import rate_at
from trainer.watch import remedies_of

SAMPLER = "inference.bench_staleness_sampler"
SAMPLE_TIMEOUT_S = 600.0
SLOTS = 128  # twice as many sample no faster here
KEPT_METRICS = (
    "age_min",
    "age_max",
    "ess",
    "kept_fraction",
    "k3",
    "mismatch_mean",
    "ratio_mean",
    "ratio_max",
    "grad_norm",
    # Of some kinds of trainer only, and where steps are controlled.
    "rounding_noise",
    "step_scale",
    "applied_kl",
    "realised_kl",
)


class Queue:
    """Batches on their way from the sampler to the trainer, `lag` of them when the policy's version is 0."""

    def __init__(self, config: Config, scale: Scale, cell: Cell, sampler: Child) -> None:
        self._config, self._scale, self._cell, self._sampler = config, scale, cell, sampler
        self._batches: deque[tuple[tuple[BatchGroup, ...], tuple[msgspec.Raw, ...]]] = deque()
        self._made = 0
        self.cpu_s = 0.0

    @property
    def total(self) -> int:
        """Batches that the whole run trains."""
        return -(-self._scale.updates // self._cell.reuse)

    @property
    def attempts(self) -> int:
        return self._made * self._scale.groups * self._scale.group_size

    def fill(self, version: int, digest: str, adapter: Path) -> None:
        """Have this policy sample what the update `lag` versions from now needs."""
        wanted = min((version + self._cell.lag) // self._cell.reuse + 1, self.total)
        batches = range(self._made, wanted)
        if not batches:
            return
        leases = [lease for batch in batches for lease in self._leases(batch)]
        trajectories = self._order(version, digest, adapter, leases)
        size = self._scale.groups * self._scale.group_size
        for index, batch in enumerate(batches):
            groups = tuple(
                BatchGroup(lease.ticket, 0, lease.instance, len(lease.samples)) for lease in self._leases(batch)
            )
            self._batches.append((groups, tuple(trajectories[index * size : (index + 1) * size])))
        self._made = wanted

    def draw(self, version: int) -> Received:
        """The batch of the update that starts from `version`; the same again while it is reused."""
        groups, trajectories = self._batches[0]
        if (version + 1) % self._cell.reuse == 0:
            self._batches.popleft()
        return Received("bench", Batch(version, version, groups, trajectories), [])

    def evaluate(self, version: int, digest: str, adapter: Path) -> float:
        """Mean reward of the policy's greedy answers to the held-out instances."""
        sampling = SamplingParams(0.0, self._config.inference.max_new_tokens)
        leases = [
            Lease(number, -1, 0, number, "eval", (0,), (0,), version, sampling)
            for number in range(self._scale.eval_samples)
        ]
        trajectories = self._order(version, digest, adapter, leases)
        return fmean(decode_trajectory(trajectory).reward for trajectory in trajectories)

    def _order(self, version: int, digest: str, adapter: Path, leases: Sequence[Lease]) -> list[msgspec.Raw]:
        order = SampleOrder(version=version, digest=digest, adapter=str(adapter), leases=list(leases))
        sampled = self._sampler.ask(order, Sampled, SAMPLE_TIMEOUT_S)
        self.cpu_s += sampled.cpu_s
        return sampled.trajectories

    def _leases(self, batch: int) -> list[Lease]:
        inference = self._config.inference
        sampling = SamplingParams(inference.temperature, inference.max_new_tokens)
        samples = tuple(range(self._scale.group_size))
        out = []
        for ticket in range(batch * self._scale.groups, (batch + 1) * self._scale.groups):
            name = f"{self._cell.seed}/{ticket}"
            seeds = tuple(number(f"sample/{name}/{sample}") for sample in samples)
            out.append(Lease(ticket, ticket, 0, number(f"instance/{name}"), "train", samples, seeds, 0, sampling))
        return out


def number(name: str) -> int:
    """63 bits from a name: equal prompts and random numbers for every correction of a seed."""
    return int.from_bytes(hashlib.blake2b(f"bench staleness/{name}".encode(), digest_size=8).digest(), "little") >> 1


class Course:
    """What is kept of a run's updates."""

    def __init__(self, config: Config) -> None:
        self._alarms = Alarms(config.algorithm.alarms, remedies_of(config))
        self._steps: list[dict[str, float]] = []
        self.outcome = Outcome()

    def add(self, batch: TrainingBatch, result: StepResult) -> None:
        update, outcome = len(self._steps), self.outcome
        outcome.rewards.append(round(float(batch.rewards.mean()), 4))
        outcome.skipped += result.skipped
        ages = {"age_min": float(batch.ages.min()), "age_max": float(batch.ages.max())}
        self._steps.append({**result.metrics, **ages})
        record = {
            **result.metrics, "step": update, "skipped": result.skipped,
            "reward": float(batch.rewards.mean()), "reward_min": float(batch.rewards.min()),
        }  # fmt: skip
        stops = [alarm for alarm in self._alarms.observe(record) if alarm.level == "stop"]
        if stops and outcome.alarm_at is None:
            outcome.alarm, outcome.alarm_at = stops[0].text, update

    def means(self, lag: int) -> dict[str, float]:
        """Over the updates at full lag; over all where there are none."""
        full = self._steps[lag:] or self._steps
        there = [key for key in KEPT_METRICS if full and all(key in step for step in full)]
        return {key: fmean(step[key] for step in full) for key in there}


def run(scale: Scale, cell: Cell, sampler: Child, folder: Path) -> Outcome:
    """Train one cell from the base model to its end; `folder` is for its adapters. A loss that is not finite ends it,
    and is its result. Raises AsyncRLError."""
    config = load_config(scale.config, overrides_of(scale, cell))
    torch.manual_seed(cell.seed)
    began = time.process_time()
    backend = make_backend(config, model_path(config))
    queue, course = Queue(config, scale, cell, sampler), Course(config)
    outcome = course.outcome
    try:
        for version in range(scale.updates + 1):
            adapter = folder / f"policy-{version % 2}.safetensors"
            digest = backend.export(adapter)
            queue.fill(version, digest, adapter)
            if version in evaluated_at(scale):
                outcome.evals.append((version, queue.evaluate(version, digest, adapter)))
            if version < scale.updates:
                batch = prepared(config, queue.draw(version), backend)
                rate = rate_at(version, config.run.steps, config.trainer)
                course.add(batch, backend.step(batch.samples, rate))
    except FloatingPointError as error:
        outcome.error = str(error)
    outcome.metrics = course.means(cell.lag)
    outcome.attempts, outcome.sample_cpu_s = queue.attempts, round(queue.cpu_s, 2)
    outcome.train_cpu_s = round(time.process_time() - began, 2)
    return outcome


def prepared(config: Config, drawn: Received, backend: Backend) -> TrainingBatch:
    """As the learner does. Raises AsyncRLError when an attempt does not train: all of them are young enough."""
    batch = prepare(drawn, config, backend.vocabulary_size)
    refused = [each.trajectory for each, end in zip(batch.attempts, batch.outcomes, strict=True) if end != "trained"]
    if refused:
        raise AsyncRLError(
            f"{len(refused)} attempts of the batch for version {batch.for_version} do not train: {refused[0].attempt}"
        )
    return batch


def sampling(config: str, cell: Cell) -> tuple[str, ...]:
    """The arguments of the cell's sampling process: policies that are the model's own weights need another engine than
    adapters do, and one of the weights' own precision."""
    arguments = [config, f"inference.slots={SLOTS}", "inference.compile=never"]
    if cell.settings.get("trainer.kind", "lora") != "lora":
        arguments += ["trainer.kind=full", "inference.in_flight=recompute"]
    arguments += [f"{key}={cell.settings[key]}" for key in ("model.dtype", "inference.dtype") if key in cell.settings]
    return tuple(arguments)


def main(config: str) -> None:
    follow_parent()
    torch.set_num_threads(1)
    tasks, answer = take_over_pipes()
    try:
        with ExitStack() as stack:
            samplers: dict[tuple[str, ...], Child] = {}
            decoder = msgspec.msgpack.Decoder(Task)
            for body in tasks:
                task = decoder.decode(body)
                arguments = sampling(config, task.cell)
                if arguments not in samplers:
                    samplers[arguments] = stack.enter_context(Child(SAMPLER, arguments, child_environment()))
                with tempfile.TemporaryDirectory(prefix="async-rl-bench-") as folder:
                    answer(run(task.scale, task.cell, samplers[arguments], Path(folder)))
    except AsyncRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The engine that forecasts are made with (buffer.virtual_node) beside the real one: the same script, and every sample
ends with the same decode step, under the same versions. What changes how the engine starts its requests changes this.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from async_rl.wire.messages import Lease, SamplingParams
from buffer import virtual_node
from buffer.scenario import Speed
from buffer.virtual_node import Job, VirtualEngine
from inference import torch_engine
from inference.engine import Request

STEPS = 150
LENGTHS = (1, 2, 3, 8, 9, 9, 9, 20)


def script(seed: int) -> list[tuple[list[int], bool, bool]]:
    """Before each step: the lengths of a new group's samples, whether a policy is flipped to, whether the newest group
    is cancelled. Nothing empties the engine before the end."""
    rng = random.Random(seed)
    steps: list[tuple[list[int], bool, bool]] = []
    newest = 0
    for step in range(STEPS):
        lasting = step % 10 == 0
        group = rng.choices(LENGTHS, k=rng.randint(1, 5)) if lasting or rng.random() < 0.4 else []
        if group:
            newest = step
        cancels = not group and newest % 10 != 0 and rng.random() < 0.1
        steps.append(([20, *group] if lasting else group, step in (40, 90), cancels))
    return steps


def real(qwen: Any, slots: int, in_flight: Any, steps: Any) -> dict[tuple[int, int], Any]:
    engine = qwen.engine(versions=(0, 1, 2), slots=slots, stop_tokens=())
    ended, version, newest, group_sizes = {}, 0, 0, {}
    for step in range(10 * STEPS):
        group, flips, cancels = steps[step] if step < STEPS else ([], False, False)
        if group:
            newest = step
            group_sizes[step] = len(group)
            for sample, length in enumerate(group):
                engine.submit(Request((step, sample), qwen.prompt(step, 6), SamplingParams(1.0, length), step, None))
        if flips:
            version += 1
            engine.flip(qwen.policy(version)[0], in_flight)
        if cancels:
            for sample in range(group_sizes[newest]):
                engine.abort((newest, sample))
        for completion in engine.step():
            if completion.finish != "abort":
                ended[completion.key] = (step, tuple((run.version, run.count) for run in completion.versions))
    assert not engine.active
    return ended


def virtual(qwen: Any, slots: int, in_flight: Any, steps: Any) -> dict[tuple[int, int], Any]:
    """A step takes a second; what comes before step n comes half a second before it."""
    engine = VirtualEngine(slots, Speed(step_s=1.0), 1.0, in_flight)
    engine.flip(qwen.policy(0)[0], 0.0)
    ended: dict[tuple[int, int], Any] = {}
    jobs: dict[tuple[int, int], Job] = {}
    version, newest = 0, 0

    def until(now: float) -> None:
        while (due := engine.due()) < now:
            for job in engine.advance(due):
                runs = tuple((run.version, run.count) for run in job.versions)
                ended[job.lease.lease, job.samples[0]] = (round(due) - 1, runs)

    for step, (group, flips, cancels) in enumerate(steps):
        now = max(0.0, step - 0.5)
        until(now)
        if group:
            newest = step
            samples = tuple(range(len(group)))
            lease = Lease(step, 0, 0, 0, "train", samples, samples, 0, SamplingParams(1.0, 1))
            for sample, length in enumerate(group):
                jobs[step, sample] = Job(lease, (sample,), length, 1.0, length)
                engine.submit(jobs[step, sample], now)
        if flips:
            version += 1
            engine.flip(qwen.policy(version)[0], now)
        if cancels:
            for key, job in jobs.items():
                # The real engine has given out by now what ends with the step that is still under way here.
                if key[0] == newest and job.end != virtual_node.ENDED and job.end > step:
                    engine.cancel(job, now)
    until(float("inf"))
    return ended


@pytest.mark.parametrize("in_flight", ["finish", "continue", "recompute"])
@pytest.mark.parametrize("slots", [4, 16])
def test_every_sample_ends_with_the_step_and_versions_that_the_real_engine_gives_it(qwen, slots, in_flight):
    for seed in range(3):
        steps = script(seed)
        expected = real(qwen, slots, in_flight, steps)
        assert len(expected) > 100
        assert virtual(qwen, slots, in_flight, steps) == expected


def test_both_start_waves_alike():
    assert virtual_node.WAVE_STEPS == torch_engine.WAVE_STEPS

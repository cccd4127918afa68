"""The trainer under a virtual clock: draw, train, confirm, publish, as trainer/learner.py does, at given durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np

from async_rl.shards import by_group
from async_rl.version import PolicyId, staleness
from async_rl.wire.messages import BatchGroup, Disposition, SamplingParams
from buffer.events import AnyEvent, BatchConfirmed, DrawRequested, EvalRequested, LendBatch, PolicyRegistered
from buffer.scenario import Scenario, numbers
from buffer.virtual_results import Payload, attempts_of


class World(Protocol):
    """What the trainer needs of the simulation."""

    now: float

    def at(self, delay: float, act: Callable[..., None], *arguments: Any) -> None: ...

    def apply(self, event: AnyEvent) -> None: ...

    def announce(self, version: int) -> None: ...


class StepRecord(NamedTuple):
    """One training step: from `started_s`, when it asked for the batch, to `ended_s`; `age_tokens` is the sum of its
    tokens' ages."""

    started_s: float
    ended_s: float
    draw_wait_s: float
    tokens: int
    age_tokens: int


class VirtualTrainer:
    """`start` publishes version 0 and draws; `train` takes a batch that was lent, `done` says that the last step is
    over. `staleness` counts tokens by age, `served` are the policies by version, `trained_tokens` are those of
    groups that were lent for the first time."""

    def __init__(
        self, steps: int, scenario: Scenario, world: World, chance: Iterator[float], rng: np.random.Generator
    ) -> None:
        self.done = False
        self.served: list[PolicyId] = []
        self.staleness: Counter[int] = Counter()
        self.log: list[StepRecord] = []
        self.trained_tokens = 0
        self.drawn_at = 0.0
        self._draw_wait_s = 0.0
        self._steps = steps
        self._scenario = scenario
        self._speed = scenario.trainer
        self._world = world
        self._chance = chance
        distributions = (self._speed.step_s, self._speed.export_s, self._speed.upload_s, self._speed.rest_s)
        self._step_s, self._export_s, self._upload_s, self._rest_s = (
            numbers(distribution, stream)
            for distribution, stream in zip(distributions, rng.spawn(len(distributions)), strict=True)
        )

    def start(self) -> None:
        self._publish(PolicyId("main", 0, "d0"))
        self._draw()

    def _draw(self) -> None:
        self.drawn_at = self._world.now
        self._world.apply(DrawRequested(len(self.served) - 1))

    def lend(self, batch: LendBatch) -> None:
        self._world.at(self._speed.lend_s, self._train, batch)

    def _train(self, batch: LendBatch) -> None:
        self._draw_wait_s = self._world.now - self.drawn_at
        skipped = next(self._chance) < self._scenario.skipped
        outcome: Literal["refused", "trained"] = "refused" if skipped else "trained"
        payloads = cast(Sequence[Payload], batch.payloads)
        dispositions = tuple(
            [
                Disposition(lease, tuple([sample for payload in own for sample in payload.samples]), outcome)
                for lease, own in groupby(payloads, key=attrgetter("lease"))
            ]
        )
        tokens, age_tokens = self._count(batch.for_version, payloads)
        self.trained_tokens += _first_time(batch.groups, payloads)
        seconds = max(0.0, next(self._step_s) + self._speed.token_s * tokens) / self._speed.workers
        self._world.at(seconds, self._confirm, batch, dispositions, skipped, tokens, age_tokens)

    def _count(self, for_version: int, payloads: Sequence[Payload]) -> tuple[int, int]:
        """All tokens of a batch, and the sum of their ages."""
        ages: Counter[int] = Counter()
        for payload in payloads:
            for run in payload.versions:
                ages[staleness(for_version, run.version)] += run.count * len(payload.samples)
        self.staleness += ages
        return ages.total(), sum(age * tokens for age, tokens in ages.items())

    def _confirm(
        self, batch: LendBatch, dispositions: tuple[Disposition, ...], skipped: bool, tokens: int, age_tokens: int
    ) -> None:
        version, speed = batch.for_version + 1, self._speed
        policy = PolicyId("main", version, self.served[-1].digest if skipped else f"d{version}")
        ess = float(next(self._chance) >= self._scenario.troubled) if self._scenario.troubled else None
        self._world.apply(BatchConfirmed(batch.batch, dispositions, ess))
        export_s = next(self._export_s) / speed.workers
        self._world.at(export_s, self._publish, policy)
        upload_s = next(self._upload_s) / speed.workers
        checkpoint = speed.checkpoint_every and version % speed.checkpoint_every == 0
        rest_s = next(self._rest_s) + (speed.checkpoint_s if checkpoint else 0.0)
        self._world.at(export_s + upload_s + rest_s, self._end_step, version, tokens, age_tokens)

    def _publish(self, policy: PolicyId) -> None:
        self.served.append(policy)
        self._world.apply(PolicyRegistered(policy))
        self._world.announce(policy.version)
        scenario = self._scenario
        if scenario.eval_every and policy.version % scenario.eval_every == 0:
            for number in range(scenario.eval_sets):
                self._world.apply(EvalRequested(
                    policy, scenario.eval_n, SamplingParams(0.0, 64), scenario.eval_timeout_s, f"set-{number}",
                    scenario.eval_samples,
                ))  # fmt: skip

    def _end_step(self, version: int, tokens: int, age_tokens: int) -> None:
        self.log.append(StepRecord(self.drawn_at, self._world.now, self._draw_wait_s, tokens, age_tokens))
        self.done = version == self._steps
        if not self.done:
            self._draw()


def _first_time(groups: Sequence[BatchGroup], payloads: Sequence[Payload]) -> int:
    """Tokens of the groups that were not trained before."""
    lent = zip(groups, by_group(groups, payloads, attempts_of), strict=True)
    return sum([payload.tokens for group, own in lent if group.uses == 0 for payload in own])

"""The engine that counts its steps against one that takes them one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.version import PolicyId
from async_rl.wire.messages import Lease, SamplingParams
from buffer.scenario import Speed
from buffer.virtual_node import BUCKET_S, NEVER, WAVE_STEPS, Job, VirtualEngine

POLICIES = [PolicyId("main", version, f"d{version}") for version in range(50)]


class Action(NamedTuple):
    at: float
    kind: str  # submit, cancel or flip
    lease: int = 0
    lengths: tuple[int, ...] = ()


class Sample:
    """One sample of the plain engine: its length, the version that computed its prompt, that which serves it, and the
    version of each token that it has."""

    def __init__(self, lease: int, length: int) -> None:
        self.lease = lease
        self.length = length
        self.born = self.policy = -1
        self.tokens: list[int] = []


def plain_engine(slots: int, speed: Speed, in_flight: Any, actions: list[Action]) -> dict[Any, Any]:
    """{(lease, place in it): (when it ended, {version: tokens})}, one decode step after the other."""
    waiting: list[tuple[Any, Sample]] = []
    running: dict[Any, Sample] = {}
    ended: dict[Any, Any] = {}
    policy, idle, next_at, credit, left = 0, 0, 0.0, 0.0, list(actions)

    def act(action: Action) -> None:
        nonlocal policy, next_at, credit
        if action.kind == "submit":
            if not waiting and not running:
                credit = min(BUCKET_S, max(0.0, action.at - next_at))
                next_at = max(next_at, action.at)
            waiting.extend(((action.lease, n), Sample(action.lease, x)) for n, x in enumerate(action.lengths))
        elif action.kind == "cancel":
            waiting[:] = [entry for entry in waiting if entry[0][0] != action.lease]
            for key in [key for key in running if key[0] == action.lease]:
                del running[key]
        else:
            policy += 1

    while left or waiting or running:
        while left and (left[0].at <= next_at or not (waiting or running)):
            act(left.pop(0))
        if not (waiting or running):
            continue
        active, free = len(waiting) + len(running), min(slots - len(running), len(waiting))
        idle = idle + free if free else 0
        started = []
        if free and (idle >= WAVE_STEPS * slots or not running):
            idle = 0
            started, waiting[:] = waiting[:free], waiting[free:]
        holders = {(sample.lease, sample.born) for sample in running.values()}
        for sample in running.values():
            flipped = in_flight != "finish" and sample.policy != policy
            if flipped:
                sample.policy = policy
            again = flipped and in_flight == "recompute"
            if again:
                sample.born = policy
            sample.tokens += [sample.policy] * min(1 + again, sample.length - len(sample.tokens))
        for key, sample in started:
            sample.born = sample.policy = policy
            shares = (sample.lease, policy) in holders
            sample.tokens = [policy] * min(sample.length, 1 if shares else 2)
            running[key] = sample
        begun, seconds = next_at, speed.step_s + speed.row_s * len(running)
        next_at = begun + seconds
        if speed.tokens_per_second:
            next_at = max(next_at, begun - credit + active / speed.tokens_per_second)
        credit = 0.0
        while left and left[0].at < begun + seconds:
            act(left.pop(0))
        for key in [key for key, sample in running.items() if len(sample.tokens) >= sample.length]:
            ended[key] = (begun + seconds, dict(Counter(running.pop(key).tokens)))
    return ended


def counting_engine(
    slots: int, speed: Speed, in_flight: Any, actions: list[Action]
) -> tuple[dict[Any, Any], VirtualEngine]:
    engine = VirtualEngine(slots, speed, 1.0, in_flight)
    engine.flip(POLICIES[0], 0.0)
    jobs: dict[Any, Job] = {}
    ended: dict[Any, Any] = {}
    version, left = 0, list(actions)
    while True:
        due = engine.due()
        if left and left[0].at < due:
            action = left.pop(0)
            if action.kind == "submit":
                samples = tuple(range(len(action.lengths)))
                lease = Lease(action.lease, 0, 0, 0, "train", samples, samples, 0, SamplingParams(1.0, 8))
                for sample, length in enumerate(action.lengths):
                    jobs[action.lease, sample] = Job(lease, (sample,), length, 1.0, length)
                    engine.submit(jobs[action.lease, sample], action.at)
            elif action.kind == "cancel":
                for key in [key for key in jobs if key[0] == action.lease and key not in ended]:
                    engine.cancel(jobs.pop(key), action.at)
            else:
                version += 1
                engine.flip(POLICIES[version], action.at)
        elif due == NEVER:
            return ended, engine
        else:
            for job in engine.advance(due):
                runs = Counter()
                for run in job.versions:
                    runs[run.version] += run.count
                ended[job.lease.lease, job.samples[0]] = (due, dict(runs))


@st.composite
def lives(draw: st.DrawFn) -> list[Action]:
    """Submissions, cancellations and flips at times at which no step begins or ends exactly."""
    actions, now = [], 0.0
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0101, 0.0503, 0.3007, 2.0011])) * (1 + 1e-3 * number)
        kind = draw(st.sampled_from(["submit", "submit", "submit", "flip", "cancel"]))
        lengths = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 9, 40]), min_size=1, max_size=5)))
        lease = draw(st.integers(0, number)) if kind == "cancel" else number
        actions.append(Action(now, kind, lease, lengths if kind == "submit" else ()))
    return actions


@settings(max_examples=400, derandomize=True)
@given(
    lives(),
    st.sampled_from([1, 2, 4, 9]),
    st.sampled_from([Speed(0.017), Speed(0.01, 0.003), Speed(tokens_per_second=37.0), Speed(0.05, 0.0, 61.0)]),
    st.sampled_from(["finish", "continue", "recompute"]),
)
def test_it_ends_every_sample_when_an_engine_that_takes_each_step_does(actions, slots, speed, in_flight):
    expected = plain_engine(slots, speed, in_flight, actions)
    ended, engine = counting_engine(slots, speed, in_flight, actions)
    assert set(ended) == set(expected)
    for key, (when, versions) in expected.items():
        assert ended[key] == (pytest.approx(when, abs=1e-9), versions), key
    sampled = sum(sum(versions.values()) for _, versions in expected.values())
    assert engine.done_rows >= sampled - 1e-9


def test_tokens_and_busy_time_are_counted():
    """Two samples of 10 and 4 tokens: 2 + 8 steps of 0.1 s, then a pause, then one of 3."""
    engine_of = [Action(0.0, "submit", 0, (10, 4)), Action(5.0, "submit", 1, (3,))]
    ended, engine = counting_engine(4, Speed(0.1), "finish", engine_of)
    assert {key: round(when, 9) for key, (when, _) in ended.items()} == {(0, 1): 0.3, (0, 0): 0.9, (1, 0): 5.2}
    assert engine.done_rows == 17
    assert engine.busy_s == pytest.approx(0.9 + 0.2)

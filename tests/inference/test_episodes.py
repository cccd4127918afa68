"""Attempts of several calls, on a real engine: what is recorded is what was sampled, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from play_house import PlayHouse, lease
from simulated_server import SimulatedServer

from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.trajectory import MAX_SEGMENTS, MaskReason, Trajectory, segment_arrays
from inference.episodes import Limits, NoRoom, Play, SampleFailed, seed_of_call
from inference.rollout import Outcome
from inference.served_engine import ServedEngine

TASK = DigitSort(DigitSortConfig(digits=5))
LIMITS = Limits(context=48, attempt=48)


class Plays:
    """A driver that does what a test says."""

    def __init__(self, how: Callable[[Play], Awaitable[Outcome]]) -> None:
        self._how = how
        self.closed = False

    async def play(self, play: Play) -> Outcome:
        return await self._how(play)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def house(qwen: Any) -> Iterator[Callable[..., PlayHouse]]:
    made: list[PlayHouse] = []

    def make(how: Callable[[Play], Awaitable[Outcome]], limits: Limits = LIMITS, **engine: Any) -> PlayHouse:
        made.append(PlayHouse(qwen.engine(**engine), TASK, None, Plays(how), limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def three_turns(play: Play) -> Outcome:
    """Each turn's prompt is all before it and two tokens of the world's."""
    prompt = [1, 2, 3]
    for turn in range(3):
        completion, place = await play.sample(prompt)
        play.transcript.rewarded(place, 0.25 * turn)
        prompt = [*prompt, *completion.tokens.tolist(), 4, 5]
    return Outcome(reward=1.0, components={"turns": 3.0})


def recomputed(qwen: Any, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """μ of every sampled token as it was recorded, and by full forwards over the recorded tokens, each version's."""
    recorded, again = [], []
    for header, arrays in zip(trajectory.segments, segment_arrays(trajectory), strict=True):
        sampled = arrays.mask == MaskReason.SAMPLED
        of_version = np.repeat([run.version for run in header.versions], [run.count for run in header.versions])
        for version in set(of_version.tolist()):
            full = qwen.logprobs(version, arrays.tokens[:1], arrays.tokens[1:], 1.0)
            recorded.append(arrays.logprobs[sampled][of_version == version])
            again.append(full[np.flatnonzero(sampled) - 1][of_version == version])
    return np.concatenate(recorded), np.concatenate(again)


def test_every_token_is_what_a_forward_over_the_record_gives_under_the_policy_stamped_on_it(
    qwen: Any, house: Callable[..., PlayHouse]
) -> None:
    """A policy comes between the turns: each call is under what serves when it starts."""
    here = house(three_turns, versions=(0, 1))
    here.start(lease(1, 0, 1, 2))

    def flip() -> None:
        if here.engine.serving == qwen.policy(0)[0] and any(each.key[1] < -3 for each in here.engine.waiting()):
            here.engine.flip(qwen.policy(1)[0], "finish")

    here.run(before_step=flip)
    assert set(here.done) == {(1, 0), (1, 1), (1, 2)}
    versions = set()
    for trajectory in here.done.values():
        (header,) = trajectory.segments
        versions |= {run.version for run in header.versions}
        recorded, again = recomputed(qwen, trajectory)
        assert len(recorded) == sum(run.count for run in header.versions) == 18
        np.testing.assert_allclose(recorded, again, atol=1e-4)
        (arrays,) = segment_arrays(trajectory)
        assert (arrays.mask == MaskReason.ENVIRONMENT).sum() == 4
        assert trajectory.reward == pytest.approx(1.75)
        assert [each.value for each in trajectory.position_rewards] == [0.0, 0.25, 0.5]
        assert trajectory.components == {"turns": 3.0}
    assert versions == {0, 1}
    assert not here.engine.active
    assert not any(here.engine.resident.values())


def test_the_same_lease_gives_the_same_tokens(house: Callable[..., PlayHouse]) -> None:
    tokens = []
    for _ in range(2):
        here = house(three_turns)
        here.start(lease(1, 0))
        here.run()
        tokens.append(segment_arrays(here.done[1, 0])[0].tokens.tolist())
    assert tokens[0] == tokens[1]
    assert len({seed_of_call(1000, call) for call in range(100)}) == 100
    assert seed_of_call(1000, 0) != seed_of_call(1001, 0)


def test_calls_side_by_side_become_segments_of_one_attempt(qwen: Any, house: Callable[..., PlayHouse]) -> None:
    async def both(play: Play) -> Outcome:
        completion, _ = await play.sample([1, 2])
        after = [1, 2, *completion.tokens.tolist()]
        await asyncio.gather(play.sample([*after, 3]), play.sample([*after, 4]), play.sample([9, 9]))
        return Outcome()

    here = house(both, Limits(48, 96))
    here.start(lease(1, 0, 1))
    here.run()
    for trajectory in here.done.values():
        assert len(trajectory.segments) == 3
        np.testing.assert_allclose(*recomputed(qwen, trajectory), atol=1e-4)


def test_a_cancelled_lease_leaves_nothing_behind(house: Callable[..., PlayHouse]) -> None:
    ended: list[Any] = []

    async def patient(play: Play) -> Outcome:
        try:
            await play.sample([1, 2, 3])
            await asyncio.sleep(60)
        finally:
            ended.append(play.attempt.key)
        return Outcome()

    here = house(patient, slots=2)
    here.start(lease(1, 0, 1, 2))
    here.hear(until=lambda: here.engine.active == 3)
    assert not here.engine.step()  # two of them are being sampled, the third waits
    here.cancel(1)
    here.hear(until=lambda: len(here.withdrawn) == len(ended) == 3)
    for completion in here.engine.step():
        here.episodes.completed(completion)
    assert not here.engine.active
    assert not any(here.engine.resident.values())
    assert not here.done
    assert here.book.closed_training_samples == 3


def test_an_answer_is_scored_by_the_task_and_both_rewards_count(house: Callable[..., PlayHouse]) -> None:
    async def answers(play: Play) -> Outcome:
        _, place = await play.sample([1, 2])
        play.transcript.rewarded(place, 0.5)
        return Outcome(reward=2.0, components={"a": 1.0}, answer="12345")

    here = house(answers)
    here.start(lease(4, 3))
    here.run()
    assert [(each.key, each.split, each.instance_id, each.completion) for each in here.scored] == [
        ((4, 3), "train", 4, "12345")
    ]
    assert here.done[4, 3].reward == 3.5
    assert here.done[4, 3].components == {"a": 1.0, "right": 1.0}


@pytest.mark.parametrize(
    ("how", "status", "note"),
    [
        ("raises", "env_failed", "KeyError"),
        ("says nothing", "env_failed", "before the model said anything"),
        ("asks for no token", "env_failed", "outside the model's vocabulary"),
        ("is given up", "aborted", "gave up"),
        ("is worth no number", "env_failed", "reward is nan"),
    ],
)
def test_what_goes_wrong_is_no_reward(house: Callable[..., PlayHouse], how: str, status: str, note: str) -> None:
    async def fails(play: Play) -> Outcome:
        if how == "says nothing":
            return Outcome()
        await play.sample([9999] if how == "asks for no token" else [1])
        if how == "raises":
            raise KeyError("its world is gone")
        if how == "is given up":
            raise SampleFailed("the engine gave up")
        return Outcome(reward=float("nan"))

    here = house(fails)
    here.start(lease(1, 0))
    here.run()
    assert (here.done[1, 0].status, here.done[1, 0].segments) == (status, ())
    assert note in here.done[1, 0].note


def test_an_attempt_grows_no_longer_than_the_buffer_keeps_room_for(house: Callable[..., PlayHouse]) -> None:
    async def on_and_on(play: Play) -> Outcome:
        prompt = [1, 2, 3]
        while True:
            completion, _ = await play.sample(prompt)
            prompt = [*prompt, *completion.tokens.tolist(), 4]

    async def anew(play: Play) -> Outcome:
        for number in range(100):
            await play.sample([number % 29, number // 29], max_new_tokens=1)
        raise AssertionError("a limit should have ended this")

    async def at_once(play: Play) -> Outcome:
        results = await asyncio.gather(*(play.sample([n]) for n in range(9)), return_exceptions=True)
        assert any(isinstance(each, NoRoom) for each in results)
        return Outcome(cut=True)

    for how, limits in ((on_and_on, Limits(48, 20)), (on_and_on, Limits(20, 48)), (anew, Limits(48, 1000))):
        here = house(how, limits)
        here.start(lease(1, 0))
        here.run()
        assert here.done[1, 0].segments[-1].finish == "length"
        assert here.done[1, 0].n_tokens <= min(limits) or len(here.done[1, 0].segments) == MAX_SEGMENTS
    here = house(at_once, Limits(48, 30))
    here.start(lease(1, 0))
    here.run()
    assert here.done[1, 0].n_tokens <= 30


def test_calls_at_once_after_the_same_tokens_leave_room_for_the_segments_that_they_begin(
    house: Callable[..., PlayHouse],
) -> None:
    async def branches(play: Play) -> Outcome:
        completion, _ = await play.sample([1, 2, 3, 4, 5, 6, 7, 8])
        after = [1, 2, 3, 4, 5, 6, 7, 8, *completion.tokens.tolist(), 9]
        results = await asyncio.gather(*(play.sample(after) for _ in range(8)), return_exceptions=True)
        assert any(isinstance(each, NoRoom) for each in results)
        return Outcome(cut=True)

    async def beside(play: Play) -> Outcome:
        calls = (play.sample([1, 2], max_new_tokens=1) for _ in range(MAX_SEGMENTS + 8))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(each, NoRoom) for each in results) == 8
        return Outcome()

    for how, limits in ((branches, Limits(48, 60)), (beside, Limits(48, 1000))):
        here = house(how, limits)
        here.start(lease(1, 0))
        here.run()
        assert here.done[1, 0].status == "ok"
        assert here.done[1, 0].n_tokens <= limits.attempt
        assert len(here.done[1, 0].segments) <= MAX_SEGMENTS


def test_a_pinned_lease_is_sampled_under_its_policy_in_every_turn(qwen: Any, house: Callable[..., PlayHouse]) -> None:
    here = house(three_turns, versions=(0, 1))
    here.engine.flip(qwen.policy(1)[0], "finish")
    here.start(lease(1, 0, policy=qwen.policy(0)[0], split="eval"))
    here.run()
    assert {run.version for run in here.done[1, 0].versions} == {0}


def test_closing_ends_the_driver_and_what_it_plays(qwen: Any) -> None:
    begun = threading.Event()
    ended: list[str] = []

    async def patient(play: Play) -> Outcome:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("play")
        return Outcome()

    driver = Plays(patient)
    here = PlayHouse(qwen.engine(), TASK, None, driver, LIMITS)
    here.start(lease(1, 0))
    assert begun.wait(60)
    here.close()
    assert driver.closed
    assert ended == ["play"]


@pytest.mark.parametrize("cancels", [False, True])
def test_an_engine_that_is_a_server_of_its_own_takes_calls_as_it_takes_requests(qwen: Any, cancels: bool) -> None:
    """vLLM and SGLang behind their adapter, which starts and gives up calls by their keys."""
    engine = ServedEngine(SimulatedServer(), qwen.path, slots=3, max_context=48, max_resident=3, stop_tokens=())
    engine.install(*qwen.policy(0))
    engine.flip(qwen.policy(0)[0], "finish")
    here = PlayHouse(engine, TASK, None, Plays(three_turns), LIMITS)
    try:
        here.start(lease(1, 0, 1, 2, 3))
        if cancels:
            here.run(until=lambda: engine.active > 0)
            here.cancel(1)
            here.run(until=lambda: not engine.active and not any(engine.resident.values()))
            assert not here.done
            return
        here.run()
        assert set(here.done) == {(1, sample) for sample in range(4)}
        for trajectory in here.done.values():
            (header,) = trajectory.segments
            assert [(run.version, run.count) for run in header.versions] == [(0, 18)]
            (arrays,) = segment_arrays(trajectory)
            assert (arrays.mask == MaskReason.ENVIRONMENT).sum() == 4
    finally:
        here.close()
        engine.close()

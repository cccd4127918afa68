"""Environments in their worker processes: what one does to itself, to its neighbours, and to the attempt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from play_house import PlayHouse, lease

from async_rl.config import Config, ConfigError
from async_rl.tasks.registry import load_task
from async_rl.trajectory import MaskReason, segment_arrays
from inference import environments
from inference.drivers import make_driver
from inference.environments import EnvironmentDriver
from inference.episodes import Limits

TASK = """
import asyncio, os, time
from async_rl.tasks.environment import EpisodeConfig, StepResult
from async_rl.tasks.task import Instance, Score

class Config(EpisodeConfig, frozen=True, kw_only=True):
    how: str = "counts"
    at: int = 1

class World:
    def __init__(self, how, at):
        self.how, self.at, self.turn = how, at, 0
    async def reset(self, instance, seed):
        self.number, self.seed = instance.data, seed
        if self.how == "cannot reset":
            raise ValueError("no world")
        return [self.number % 29, 1]
    async def step(self, said):
        self.turn += 1
        assert len(said.tokens) >= 1 and said.finish in ("stop", "length")
        if self.turn == self.at:
            if self.how == "raises": raise KeyError("lost")
            if self.how == "hangs": await asyncio.sleep(600)
            if self.how == "blocks" and self.number == 1: time.sleep(600)
            if self.how == "dies": os._exit(3)
            if self.how == "is odd": return StepResult([{"no": "role"}])
        if self.turn == 3 and self.how != "never ends":
            return StepResult("", 0.5, True, {"turns": float(self.turn)})
        return StepResult([2, 3], 0.25, components={"seed": float(self.seed)})
    async def close(self):
        pass

class Worlds:
    Config = Config
    tools = ()
    def __init__(self, config):
        self.limits, self.config = config, config
    def size(self, split):
        return None
    def instance(self, split, instance):
        return Instance("a", None, "b", data=instance)
    def environment(self):
        return World(self.config.how, self.config.at)
"""
LIMITS = Limits(48, 48)


class Tokens:
    """Text of ids, for the tests' model of 29 tokens."""

    eos_token_id = -1

    def decode(self, ids: list[int], **_: bool) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def house(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlayHouse]]:
    (tmp_path / "worlds_of_tests.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[2]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(environments, "LATE_S", 30.0)
    made: list[PlayHouse] = []

    def make(**options: Any) -> PlayHouse:
        table = {"kind": "worlds_of_tests:Worlds", "step_timeout": 30.0} | options
        task: Any = load_task(table)
        made.append(PlayHouse(qwen.engine(), task, None, EnvironmentDriver(task, table, Tokens(), 1), LIMITS))
        return made[-1]

    yield make
    for each in made:
        each.close()
    sys.modules.pop("worlds_of_tests", None)


def test_an_attempt_is_played_to_its_end(house: Callable[..., PlayHouse]) -> None:
    here = house()
    here.start(lease(3, 0, 1))
    here.run()
    trajectory = here.done[3, 1]
    assert trajectory.reward == 1.0
    assert [each.value for each in trajectory.position_rewards] == [0.25, 0.25, 0.5]
    assert trajectory.components == {"turns": 3.0, "seed": 2 * 3001.0}
    (arrays,) = segment_arrays(trajectory)
    assert arrays.tokens[:2].tolist() == [3, 1]
    assert (arrays.mask == MaskReason.ENVIRONMENT).sum() == 4
    positions = [each.position for each in trajectory.position_rewards]
    assert (arrays.mask[positions] == MaskReason.SAMPLED).all()
    assert positions[-1] == len(arrays.tokens) - 1
    assert trajectory.segments[0].finish == "length", "its turns were cut, as the tests' model knows no stop token"


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("cannot reset", "ValueError: no world"),
        ("raises", "KeyError: 'lost'"),
        ("is odd", "TypeError"),
        ("dies", "worker process ended"),
    ],
)
def test_a_world_that_fails_is_no_reward(house: Callable[..., PlayHouse], how: str, note: str) -> None:
    here = house(how=how)
    here.start(lease(1, 0))
    here.run()
    assert here.done[1, 0].status == "env_failed"
    assert note in here.done[1, 0].note


def test_a_step_that_hangs_ends_that_attempt_alone(house: Callable[..., PlayHouse]) -> None:
    here = house(how="hangs", at=2, step_timeout=0.3)
    here.start(lease(1, 0))
    here.run()
    assert here.done[1, 0].status == "env_failed"
    assert "a step took longer than 0.3 s" in here.done[1, 0].note


def test_one_that_blocks_its_worker_is_killed_with_it_and_later_ones_find_another(
    house: Callable[..., PlayHouse], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "LATE_S", 0.5)
    of_others = set(psutil.Process().children(recursive=True))  # what a session's fixtures keep running
    here = house(how="blocks", step_timeout=10.0)
    here.start(lease(2, 0))
    here.run()
    workers = set(psutil.Process().children(recursive=True)) - of_others
    assert workers
    here.start(lease(1, 0))
    here.run()
    here.start(lease(2, 0))
    here.run()
    assert here.done[1, 0].status == "env_failed"
    assert "its worker was killed" in here.done[1, 0].note
    assert here.done[2, 0].status == "ok"
    assert workers.isdisjoint(psutil.Process().children(recursive=True))


def test_an_attempt_that_is_cancelled_while_its_worker_starts_takes_no_other_along(
    house: Callable[..., PlayHouse],
) -> None:
    here = house()
    before = {each.pid for each in psutil.Process().children()}
    here.start(lease(1, 0))
    ends = time.monotonic() + 60
    while {each.pid for each in psutil.Process().children()} <= before and time.monotonic() < ends:
        time.sleep(0.001)
    time.sleep(0.1)  # by now it is awaited that the worker says that it is ready
    here.cancel(1)
    here.start(lease(2, 0))
    here.run()
    assert here.done[2, 0].status == "ok", here.done[2, 0].note


def test_limits_of_turns_and_tokens_cut_an_attempt_which_keeps_what_it_has(house: Callable[..., PlayHouse]) -> None:
    for options, sampled in (({"max_turns": 2}, 12), ({"max_sampled_tokens": 9}, 9)):
        here = house(how="never ends", **options)
        here.start(lease(1, 0))
        here.run()
        trajectory = here.done[1, 0]
        assert (trajectory.status, trajectory.reward) == ("ok", 0.5)
        assert trajectory.segments[-1].finish == "length"
        assert sum(run.count for run in trajectory.versions) == sampled


def test_so_does_the_limit_of_time(house: Callable[..., PlayHouse]) -> None:
    for limit_s in (3.0, 30.0):  # a busy machine may not come to its first turn in the first
        here = house(how="hangs", at=2, time_limit=limit_s)
        here.start(lease(1, 0))
        here.run()
        trajectory = here.done[1, 0]
        if trajectory.status == "ok":
            break
    assert trajectory.status == "ok"
    assert trajectory.segments[-1].finish == "length"
    assert trajectory.reward <= 0.25, "at the latest in its second turn"


def test_no_worker_is_left_behind(house: Callable[..., PlayHouse]) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    here = house()
    here.start(lease(1, 0))
    here.run()
    workers = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert any("inference.environment_worker" in " ".join(each.cmdline()) for each in workers)
    here.close()
    psutil.wait_procs(workers, timeout=60)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers)


def test_what_is_missing_is_said_before_a_run() -> None:
    task = load_task({"kind": "calculator"})
    with pytest.raises(ConfigError, match=r"inference\.episodes\.max_tokens=512 or more"):
        make_driver(task, {"kind": "calculator"}, Config(), None)
    assert make_driver(load_task({"kind": "digit_sort"}), {"kind": "digit_sort"}, Config(), None) is None

    class Half:
        def environment(self) -> None: ...

    with pytest.raises(ConfigError, match="lacks limits, tools, instance, size"):
        make_driver(Half(), {"kind": "mine:Half"}, Config(), None)

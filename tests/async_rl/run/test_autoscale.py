"""[launch.autoscale]: the rule in worlds where more nodes do more, and what it reads off a run's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.launch_config import AutoscaleConfig
from async_rl.run.autoscale import Autoscale, Judge, Mark, Pressure, pressure_of, wanted
from async_rl.run.scaling import ScaleAnswer, ScaleError
from async_rl.wire.messages import NodeStatus, Status

SETTINGS = AutoscaleConfig(max_nodes=64, cool_down=60.0, every=15.0, looks=2)


def world(nodes: int, trainer: float) -> Pressure:
    """Of nodes that each make one batch in a unit of time, and a trainer that trains on `trainer` of them."""
    done = min(float(nodes), trainer)
    return Pressure(1 - done / trainer, done / nodes)


@given(st.integers(1, 64), st.floats(0.5, 60))
def test_it_comes_to_rest_where_neither_pool_waits_for_long(nodes: int, trainer: float) -> None:
    seen = [nodes]
    for _ in range(12):
        nodes = wanted(nodes, world(nodes, trainer), SETTINGS)
        seen.append(nodes)
    assert seen[-1] == seen[-2] == seen[-3], seen
    idle, busy = world(nodes, trainer)
    assert idle <= SETTINGS.trainer_idle
    needed = math.ceil(nodes * busy / SETTINGS.nodes_busy - 1e-6)
    assert nodes <= max(needed, 1), "a smaller pool would do the same"
    turns = sum((b > a) != (c > b) for a, b, c in zip(seen, seen[1:], seen[2:], strict=False) if a != b and b != c)
    assert turns <= 1, seen


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0, 1), st.integers(1, 20), st.integers(0, 30))
def test_it_stays_within_its_bounds_and_at_most_doubles(nodes: int, idle: float, busy: float, least: int, more: int):
    settings = AutoscaleConfig(min_nodes=least, max_nodes=least + more)
    aim = wanted(nodes, Pressure(idle, busy), settings)
    assert least <= aim <= least + more
    assert aim <= max(2 * nodes, least)


@given(st.floats(0.16, 1), st.floats(0, 0.8))
def test_where_both_pools_wait_their_number_is_left_alone(idle: float, busy: float) -> None:
    assert wanted(7, Pressure(idle, busy), SETTINGS) == 7


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60), st.floats(1, 40))
def test_between_two_changes_lie_the_cool_down_and_looks_that_agree(looks: list[tuple[float, float]], every: float):
    judge, nodes, changes = Judge(SETTINGS, 0.0), 8, [0.0]
    aims: list[int] = []
    for index, (idle, busy) in enumerate(looks, 1):
        now = index * every
        aims.append(wanted(nodes, Pressure(idle, busy), SETTINGS) - nodes)
        decided = judge.hear(now, nodes, Pressure(idle, busy))
        if decided != nodes:
            assert now - changes[-1] >= SETTINGS.cool_down
            last = aims[-SETTINGS.looks :]
            assert all(aim > 0 for aim in last) or all(aim < 0 for aim in last)
            assert abs(decided - nodes) == min(abs(aim) for aim in last)
            changes.append(now)
            nodes = decided


class Pool:
    """What `Autoscale` needs of a run's sizes."""

    def __init__(self, nodes: int) -> None:
        self.names = [f"node-{index}" for index in range(nodes)]
        self.refuses = False

    def present(self, group: str) -> list[str]:
        return list(self.names)

    def resize(self, group: str, nodes: int) -> ScaleAnswer:
        if self.refuses:
            raise ScaleError("the run is about to end")
        before, self.names = self.names, [f"node-{index}" for index in range(nodes)]
        return ScaleAnswer(before=len(before), started=tuple(self.names[len(before) :]))


def status(names: list[str], busy_s: float, alive_s: float, state: str = "ready") -> Status:
    nodes = tuple(
        NodeStatus(name, state, "torch", 8, None, 0, 0.0, 0, busy_s=busy_s, alive_s=alive_s) for name in names
    )
    return Status(
        uptime_s=1.0, nodes=nodes, trainer="", newest=None, confirmed_batches=0, steps=9, ledger={}, eval_ledger={},
        outside={}, ready_groups=0, ready_bytes=0, reserved_bytes=0, waiting="", push_ms=(), bound=4,
    )  # fmt: skip


def step(time_s: float, draw_wait_s: float) -> dict[str, Any]:
    return {"time_s": time_s, "draw_wait_s": draw_wait_s, "reward": 0.5}


def test_a_trainer_that_waits_for_busy_nodes_gets_more_and_the_reason_is_said() -> None:
    pool, scale = Pool(2), AutoscaleConfig(max_nodes=8, cool_down=30.0, every=10.0, looks=2)
    autoscale = Autoscale(scale, pool, 0.0)  # type: ignore[arg-type]
    said, steps = [], []
    for second in range(1, 120):
        if second % 5 == 0:
            steps.append(step(float(second), 2.0))  # of 5 seconds
        done = autoscale.look(float(second), steps, status(pool.names, 0.95 * second, float(second)))
        if done:
            said.append((second, done))
    assert len(pool.names) > 3
    first, words = said[0]
    assert first >= 30 + 10  # the cool-down of the beginning, and a second look
    assert words == (
        "autoscale: 2 → 4 nodes, node-2, node-3 started: the trainer waited 40% of its time, the nodes had work 95% of "
        "theirs"
    )
    assert said[1][0] - first >= 30


def test_nothing_is_judged_while_nodes_are_still_coming_or_no_step_was_done() -> None:
    pool = Pool(2)
    autoscale = Autoscale(AutoscaleConfig(max_nodes=8, cool_down=1.0, every=1.0, looks=1), pool, 0.0)  # type: ignore[arg-type]
    steps = [step(float(second), 0.9) for second in range(1, 40)]
    for second in range(1, 30):
        assert autoscale.look(float(second), steps[:second], None) == ""
        assert autoscale.look(float(second), steps[:second], status(pool.names, second, second, "syncing")) == ""
        assert autoscale.look(float(second), steps[:3], status(pool.names, second, second)) == ""
    assert autoscale.look(30.0, steps[:30], status(pool.names, 30, 30)) != ""


def test_what_the_launcher_refuses_is_told_and_tried_again_after_the_cool_down() -> None:
    pool = Pool(2)
    pool.refuses = True
    autoscale = Autoscale(AutoscaleConfig(max_nodes=8, cool_down=10.0, every=1.0, looks=1), pool, 0.0)  # type: ignore[arg-type]
    said = [
        autoscale.look(float(s), [step(float(t), 0.9) for t in range(1, s + 1)], status(pool.names, s, s))
        for s in range(1, 40)
    ]
    assert [words for words in said if words] == ["autoscale: the run is about to end"] * 3


def test_the_pressure_is_that_of_the_look_and_not_of_all_time() -> None:
    steps = [step(10.0, 10.0), step(20.0, 1.0), step(30.0, 2.0)]
    mark = Mark(0.0, 1, {"a": (0.0, 100.0), "b": (50.0, 100.0)})
    seen = pressure_of(mark, steps, {"a": (15.0, 120.0), "b": (60.0, 120.0)})
    assert seen == pytest.approx((3.0 / 20.0, 25.0 / 40.0))


def test_a_node_that_counts_from_0_again_says_nothing_in_that_look() -> None:
    mark = Mark(0.0, 0, {"a": (50.0, 100.0), "b": (0.0, 0.0)})
    seen = pressure_of(mark, [step(5.0, 0.0)], {"a": (1.0, 2.0), "b": (4.0, 5.0)})
    assert seen == pytest.approx((0.0, 0.8))

"""The task of an agent is another task's, played by a program."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config import config_from_table
from async_rl.data.order import Source
from async_rl.schema import ConfigError
from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.tasks.registry import instance_sources, load_task

TABLE: dict[str, Any] = {"kind": "agent", "command": ["python", "a.py"], "of": {"kind": "digit_sort", "digits": 5}}


def test_instances_and_scores_are_those_of_the_task_that_it_works_on() -> None:
    task, of = load_task(TABLE), DigitSort(DigitSortConfig(digits=5))
    for split in ("train", "eval"):
        assert task.size(split) == of.size(split)
        assert task.instance(split, 7) == of.instance(split, 7)
    instance = of.instance("train", 7)
    assert task.score(instance, str(instance.answer)) == of.score(instance, str(instance.answer))


def test_or_the_scores_of_reward_tables() -> None:
    task = load_task(TABLE | {"reward": [{"kind": "format", "pattern": "x", "weight": 0.5}]})
    assert task.score(task.instance("train", 7), "xyz") == (0.5, {"format": 1.0})


def test_epochs_go_through_the_instances_of_the_task_that_it_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def sources(section: Any) -> tuple[Source, ...]:
        asked.append(section)
        return (Source(9, 1, 0),)

    monkeypatch.setattr(DigitSort, "sources", staticmethod(sources), raising=False)
    table = {"model": {"path": "x"}, "task": TABLE}
    assert instance_sources(config_from_table(table, "a test")) == (Source(9, 1, 0),)
    assert asked == [DigitSortConfig(digits=5)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": []}, "command"),
        ({"of": {"kind": "agent"}}, "the task that the agent works on"),
        ({"of": {"kind": "digit_sorting"}}, "digit_sort"),
        ({"scored": "agent", "reward": [{"kind": "format", "pattern": "x"}]}, "remove the"),
        ({"scored": "stderr"}, "scored"),
        ({"comand": ["a"]}, "command"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(TABLE | changes)


def test_a_task_of_ones_own_need_not_be_installed_where_the_buffer_runs_unless_epochs_ask_for_it() -> None:
    table = {"model": {"path": "x"}, "task": {"kind": "not_installed_here:Task"}}
    assert instance_sources(config_from_table(table, "a test")) == ()
    with pytest.raises(ConfigError, match="not_installed_here"):
        instance_sources(config_from_table(table | {"buffer": {"epochs": True}}, "a test"))

"""Which driver plays the attempts of a task, where they have several calls of the model."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

from async_rl.config import Config, ConfigError, longest_attempt
from async_rl.eval_config import eval_tasks
from async_rl.tasks.agent import Agent
from async_rl.tasks.environment import EnvironmentTask, check_attempts
from inference.agents import AgentDriver
from inference.environments import EnvironmentDriver
from inference.episodes import Driver, Episodes, Limits


def make_episodes(
    tasks: Mapping[str, Any], config: Config, tokenizer: Any, inbox: queue.SimpleQueue[Any]
) -> Episodes | None:
    """Of the run's task ("") and those that sets of evaluation have of their own, by the set's name; None where all of
    them ask once. Raises ConfigError."""
    tables = {"": config.task, **eval_tasks(config)}
    drivers: dict[str, Driver] = {}
    for name, task in tasks.items():
        driver = make_driver(task, tables[name], config, tokenizer)
        if driver is not None:
            drivers[name] = driver
    if not drivers:
        return None
    return Episodes(drivers, Limits(config.inference.max_context, longest_attempt(config)), inbox)


def make_driver(task: Any, table: Mapping[str, Any], config: Config, tokenizer: Any) -> Driver | None:
    """What plays the attempts of a task, of this [task] table; None for one that asks once. Raises ConfigError."""
    if hasattr(task, "environment"):
        check_environment_task(task, table)
        check_attempts(table, config, task.limits.time_limit)
        return EnvironmentDriver(task, table, tokenizer, config.inference.episodes.workers)
    if isinstance(task, Agent):
        check_attempts(table, config, task.options.time_limit)
        return AgentDriver(task, tokenizer)
    return None


def check_environment_task(task: Any, table: Mapping[str, Any]) -> None:
    if not isinstance(task, EnvironmentTask):
        lacking = ", ".join(name for name in ("limits", "tools", "instance", "size") if not hasattr(task, name))
        raise ConfigError(
            f"[task] kind = {table.get('kind')!r} makes environments, and lacks {lacking}: see "
            "async_rl/tasks/environment.py"
        )

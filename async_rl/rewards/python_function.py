"""A reward that is a function of yours: kind "python".

    def my_reward(instance, completion, **options): ...    # a number, or a Score with components of its own

It may be `async def`. Pools start with Python's safe path, so its module must be installed or lie in a folder named in
PYTHONPATH, on every machine that runs a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from typing import Any, ClassVar

import msgspec

from async_rl.imports import imported
from async_rl.rewards.reward import RewardConfig
from async_rl.schema import ConfigError, PositiveInt
from async_rl.tasks.task import Instance, Score

WHERE = '[[task.reward]] of kind "python"'


class PythonConfig(RewardConfig, frozen=True, kw_only=True):
    function: str
    """ "module:function"."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of every call."""
    concurrency: PositiveInt = 1
    """How many calls a scoring worker may make at once, each in a thread; for functions that wait for something and
    may be called so. Otherwise more of [inference] reward_workers let slow ones overlap."""


class PythonFunction:
    """What the function returns."""

    Config: ClassVar[type[RewardConfig]] = PythonConfig
    seconds = 0.0

    def __init__(self, config: PythonConfig) -> None:
        self._function = load_function(config.function)
        self._options = config.options
        # Who may not be called by several threads is not, whatever the other rewards allow.
        self.concurrency = config.concurrency if config.concurrency > 1 else 0
        self._alone = contextlib.nullcontext() if self.concurrency else threading.Lock()

    def score(self, instance: Instance, completion: str) -> float | Score:
        with self._alone:
            value = self._function(instance, completion, **self._options)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
        return Score(*value) if isinstance(value, tuple) else float(value)


async def _awaited(value: Any) -> Any:
    return await value


def load_function(path: str) -> Any:
    """What "module:function" names. Raises ConfigError."""
    function = imported(path, f"{WHERE}: function = {path!r}")
    if not callable(function):
        raise ConfigError(f"{WHERE}: function = {path!r} is no function")
    return function

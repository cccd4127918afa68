"""From the [task] table of a config to a task.

`kind` is the name of a task that comes with async-rl, or `"module:Class"` to bring your own: any importable class
with the shape of `async_rl.tasks.task.Task`. Pools start with Python's safe path, so the module must be installed or
lie in a folder named in PYTHONPATH, on every machine that runs a node. Modules are imported only when asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, cast

from async_rl.buffer_config import keeps_history
from async_rl.config import Config, ConfigError, Section, convert_section
from async_rl.tasks.task import Task

MAX_INSTANCES = 1 << 20  # of which the buffer keeps a history; it takes 16 bytes for each, here and in snapshots
KINDS = {
    "digit_sort": "async_rl.tasks.digit_sort:DigitSort",
    "reasoning_gym": "async_rl.tasks.gym:ReasoningGym",
    "gsm8k": "async_rl.tasks.gsm8k:Gsm8k",
    "calculator": "async_rl.tasks.calculator:Calculator",
    "tools": "async_rl.tasks.with_tools:WithTools",
}


def load_task(table: Mapping[str, Any]) -> Task:
    """The task of a [task] table, its remaining keys converted strictly into the task's own `Config`. Raises
    ConfigError for a kind, key or value that is not known, and AsyncRLError for an optional package that is missing."""
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f'[task] needs a key `kind`: one of {", ".join(KINDS)}, or "module:Class"')
    task_class = _task_class(kind)
    options = {key: value for key, value in table.items() if key != "kind"}
    return cast(Task, task_class(convert_section(options, task_class.Config, f'[task] of kind "{kind}"')))


def known_instances(config: Config) -> int:
    """How many training instances the task has, where the buffer keeps a history of each; 0 where it does not. Raises
    ConfigError when there are too many of them, or no end, and what `load_task` raises."""
    buffer = config.buffer
    if not keeps_history(buffer):
        return 0
    size = load_task(config.task).size("train")
    if size is None or size > MAX_INSTANCES:
        there = "has no end to its training instances" if size is None else f"has {size} training instances"
        wanted = f'[buffer] retire_above = {buffer.retire_above:g} and difficulty = "{buffer.difficulty}"'
        raise ConfigError(
            f"{wanted} need a history of every instance, and [task] kind = {config.task['kind']!r} {there}: give it a "
            f'size of at most {MAX_INSTANCES}, or set retire_above = 0 and difficulty = "uniform"'
        )
    return size


def _task_class(kind: str) -> Any:
    module_name, colon, class_name = KINDS.get(kind, kind).partition(":")
    if not colon:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f'known kinds: {", ".join(KINDS)}, or "module:Class"'
        raise ConfigError(f"[task] unknown kind {kind!r}: {advice}")
    try:
        task_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"[task] kind {kind!r} cannot be loaded: {error}. The module must be installed, or its folder named in "
            "PYTHONPATH"
        ) from error
    config = getattr(task_class, "Config", None)
    if not (isinstance(config, type) and issubclass(config, Section)):
        raise ConfigError(f"[task] kind {kind!r}: the class needs `Config`, a subclass of async_rl.config.Section")
    return task_class

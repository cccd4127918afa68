"""From the [task] table of a config to a task.

`kind` is the name of a task that comes with async-rl, or `"module:Class"` to bring your own: any importable class
with the shape of `async_rl.tasks.task.Task`. Pools start with Python's safe path, so the module must be installed or
lie in a folder named in PYTHONPATH, on every machine that runs a node, and where [buffer] has epochs or a history on
the buffer's too. Modules are imported only when asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, cast

from async_rl.buffer_config import BufferConfig, keeps_history
from async_rl.config import Config, ConfigError, Section, convert_section
from async_rl.data.order import Source
from async_rl.imports import imported
from async_rl.tasks.task import Task

MAX_INSTANCES = 1 << 20  # of which the buffer keeps a history; it takes 16 bytes for each, here and in snapshots
KINDS = {
    "digit_sort": "async_rl.tasks.digit_sort:DigitSort",
    "reasoning_gym": "async_rl.tasks.gym:ReasoningGym",
    "gsm8k": "async_rl.tasks.gsm8k:Gsm8k",
    "dataset": "async_rl.data.task:DatasetTask",
    "calculator": "async_rl.tasks.calculator:Calculator",
    "tools": "async_rl.tasks.with_tools:WithTools",
    "agent": "async_rl.tasks.agent:Agent",
    "human_eval": "async_rl.tasks.human_eval:HumanEval",
    "verifiers": "async_rl.tasks.verifiers_env:VerifiersTask",
}


def load_task(table: Mapping[str, Any]) -> Task:
    """The task of a [task] table, its remaining keys converted strictly into the task's own `Config`. Raises
    ConfigError for a kind, key or value that is not known, and AsyncRLError for an optional package that is missing."""
    task_class, section = _section(table)
    return cast(Task, task_class(section))


def _section(table: Mapping[str, Any]) -> tuple[Any, Section]:
    """A task's class and its own part of [task]. Raises ConfigError."""
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f'[task] needs a key `kind`: one of {", ".join(KINDS)}, or "module:Class"')
    task_class = _task_class(kind)
    options = {key: value for key, value in table.items() if key != "kind"}
    return task_class, convert_section(options, task_class.Config, f'[task] of kind "{kind}"')


def instance_sources(config: Config) -> tuple[Source, ...]:
    """What a run's training instances are gone through by, in epochs; empty when each ticket draws one independently.
    A task class of ours says by `sources(section)` that it is always asked so; all are where [buffer] epochs says so,
    and only then need one's own class be installed where the buffer runs. Raises ConfigError when there is no end to
    them, and what making a task raises."""
    table: Mapping[str, Any] = config.task
    while True:
        if table.get("kind") not in KINDS and not config.buffer.epochs:
            return ()
        task_class, section = _section(table)
        of = getattr(section, "of", None)
        if not isinstance(of, Mapping):
            break
        table = of  # the questions of a task with tools, of an agent
    if hasattr(task_class, "sources"):
        return tuple(task_class.sources(section))
    if not config.buffer.epochs:
        return ()
    size = load_task(config.task).size("train")
    if size is None:
        raise ConfigError(
            f"[buffer] epochs = true, and [task] kind = {config.task['kind']!r} has no end to its training instances: "
            "give it a size, or set epochs = false"
        )
    return (Source(size, 1, 0),)


def known_instances(config: Config) -> int:
    """How many training instances the task has, where the buffer keeps a history of each; 0 where it does not. Raises
    ConfigError when there are too many of them, or no end, and what `load_task` raises."""
    buffer = config.buffer
    if not keeps_history(buffer):
        return 0
    sources = instance_sources(config)
    if any(source.block for source in sources):
        raise ConfigError(
            f"{_wanted(buffer)} ask again what was asked before, and a source with streaming = true is only read "
            'forward: set streaming = false, or retire_above = 0 and difficulty = "uniform"'
        )
    size = sum(source.size for source in sources) if sources else load_task(config.task).size("train")
    if size is None or size > MAX_INSTANCES:
        there = "has no end to its training instances" if size is None else f"has {size} training instances"
        raise ConfigError(
            f"{_wanted(buffer)} need a history of every instance, and [task] kind = {config.task['kind']!r} {there}: "
            f'give it a size of at most {MAX_INSTANCES}, or set retire_above = 0 and difficulty = "uniform"'
        )
    return size


def _wanted(buffer: BufferConfig) -> str:
    return f'[buffer] retire_above = {buffer.retire_above:g} and difficulty = "{buffer.difficulty}"'


def _task_class(kind: str) -> Any:
    path = KINDS.get(kind, kind)
    if ":" not in path:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f'known kinds: {", ".join(KINDS)}, or "module:Class"'
        raise ConfigError(f"[task] unknown kind {kind!r}: {advice}")
    task_class = imported(path, f"[task] kind {kind!r}")
    config = getattr(task_class, "Config", None)
    if not (isinstance(config, type) and issubclass(config, Section)):
        raise ConfigError(f"[task] kind {kind!r}: the class needs `Config`, a subclass of async_rl.config.Section")
    return task_class

"""What the benchmarks of engines have them do: the config's model, and prompts of its task in groups, without end."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.run.checks import is_made
from async_rl.run.model_cache import model_path
from async_rl.tasks.rendering import render
from async_rl.tasks.task import Task, instance_of

MAKE_TIMEOUT_S = 1800.0
GROUP = 8
SEED = 1


class Load(NamedTuple):
    """`slots` attempts at a time, of `shortest` to `longest` new tokens, uniformly drawn."""

    slots: int
    shortest: int
    longest: int

    @property
    def name(self) -> str:
        lengths = f"{self.shortest}-{self.longest}" if self.shortest < self.longest else f"all {self.longest}"
        return f"{self.slots} slots, {lengths} new tokens"


class Group(NamedTuple):
    """Attempts at one prompt; `lengths` are their new tokens."""

    number: int
    prompt: list[int]
    lengths: list[int]


def groups(load: Load, task: Task, tokenizer: Any) -> Iterator[Group]:
    """Without end, and the same ones every time."""
    random = np.random.default_rng(SEED)
    for number in itertools.count():
        lengths = random.integers(load.shortest, load.longest + 1, GROUP).tolist()
        yield Group(number, render(instance_of(task, "train", number), tokenizer), lengths)


def made_model(config: Config, name: str, overrides: Sequence[str] = ()) -> Path:
    """The model of the config of that name; a tiny one is made first where it is not in the cache yet. Raises
    AsyncRLError."""
    path = model_path(config)
    if not config.model.path and not is_made(path):
        command = [sys.executable, "-P", "-m", "trainer.tiny_model", "--config", name]
        command += [word for override in overrides for word in ("--set", override)]
        if subprocess.run(command, timeout=MAKE_TIMEOUT_S).returncode:
            raise AsyncRLError(f"there is no model at {path}, and it could not be made: see above")
    return path

"""The contract of an environment: a task of several turns, whose world answers what the model says.

    class Guess:                                    # a task: one class, as in async_rl.tasks.task
        Config = GuessConfig                        # a subclass of EpisodeConfig: the limits are keys of [task] too
        def size(self, split): ...
        def instance(self, split, instance): ...    # what an environment is reset to
        def environment(self): ...                  # a new world, for one attempt
        tools = ()                                  # what a chat template is told of tools (async_rl.tasks.tools)
        limits: EpisodeConfig                       # the config itself

Environments are somebody's code: they run in a worker process of the node, many at a time in one event loop, each step
within `step_timeout`. What one raises, a step that does not end, or a worker that dies is a failed environment: the
attempt is tried again, and never a reward of 0. One that blocks the loop ends all that share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from async_rl.config import Config
from async_rl.schema import ConfigError, Count, PositiveFloat, PositiveInt, Section
from async_rl.tasks.task import Instance, Split

Message = Mapping[str, Any]
"""Of a chat: `role`, `content`, and what else the model's template reads."""

Observation = str | Sequence[Message] | Sequence[int]
"""What the model sees next: messages for its chat template, plain text for a model without one, or token ids. One kind
all through an attempt."""


class EpisodeConfig(Section, frozen=True, kw_only=True):
    """Base of the Config of a task of several turns. An attempt that comes to one of the first three limits is cut: it
    ends with the rewards that it has, and counts as one that was too long ([algorithm] truncated)."""

    max_turns: PositiveInt = 8
    """Turns of the model in an attempt."""
    max_sampled_tokens: Count = 0
    """Tokens that the model may sample in an attempt, all turns together; 0 is as many as the context holds."""
    time_limit: PositiveFloat = 300.0
    """Seconds of an attempt after its reset; less than buffer.lease_timeout."""
    step_timeout: PositiveFloat = 30.0
    """Seconds that a reset, a step or a close of the environment may take."""


class Said(NamedTuple):
    """What the model said in a turn: its text without special tokens, the ids it sampled (its stop token included), and
    whether it stopped by itself or was cut at inference.max_new_tokens."""

    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]


class StepResult(NamedTuple):
    """What the world answers. `reward` is for this turn; an attempt's reward is the sum of its turns'. With `done` the
    model says no more, and the observation does not count; an `answer` is then judged by the task's own `score`, in a
    scoring worker, and what it gives counts besides. `components` add up over the turns by name, for the metrics."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    components: Mapping[str, float] = {}
    answer: str | None = None


class Environment(Protocol):
    """One attempt's world. All randomness comes from `seed`, so that the same attempt sees the same world. One that
    has an attribute `tools` after its reset has these told to the template, in place of its task's."""

    async def reset(self, instance: Instance, seed: int) -> Observation:
        """The first observation. Called once."""

    async def step(self, said: Said) -> StepResult: ...

    async def close(self) -> None:
        """Always called, also of an attempt that was cancelled."""


@runtime_checkable
class EnvironmentTask(Protocol):
    """A task whose attempts have several turns (see async_rl.tasks.task.Task for what is the same)."""

    Config: ClassVar[type[Section]]
    limits: EpisodeConfig
    tools: Sequence[Mapping[str, Any]]

    def size(self, split: Split) -> int | None: ...

    def instance(self, split: Split, instance: int) -> Instance: ...

    def environment(self) -> Environment: ...


def check_attempts(table: Mapping[str, Any], config: Config, limit_s: float) -> None:
    """A run whose task, of this [task] table, has attempts of several calls, each of at most so many seconds. Raises
    ConfigError where the buffer keeps no room for them, or takes a lease back before its attempts may be over."""
    inference, lease_s = config.inference, config.buffer.lease_timeout
    if not inference.episodes.max_tokens:
        raise ConfigError(
            f"[task] kind = {table.get('kind')!r} has attempts of several turns, and the buffer has to keep room for "
            f"them: set the most tokens of one, --set inference.episodes.max_tokens={inference.max_context} or more"
        )
    if limit_s >= lease_s:
        raise ConfigError(
            f"[task] kind = {table.get('kind')!r} gives an attempt time_limit = {limit_s:g} s, and its lease is taken "
            f"back after [buffer] lease_timeout = {lease_s:g} s: make the first smaller"
        )

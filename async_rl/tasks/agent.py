"""Agents that speak HTTP: an attempt is a program of yours, which the node starts with an OpenAI-compatible endpoint.

    [task]
    kind = "agent"
    command = ["python", "/opt/agents/solve.py"]

    [task.of]                  # where the questions come from: any other task
    kind = "gsm8k"
    path = "/data/gsm8k"

Its calls of the model are the attempt's trajectory. How it is started and spoken to: docs/agents.md and
inference/agents.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from async_rl.rewards import load_rewards
from async_rl.schema import ConfigError, PositiveFloat, PositiveInt, Section
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Instance, Score, Split

WHERE = '[task] of kind "agent"'


class AgentConfig(Section, frozen=True, kw_only=True):
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The program and its arguments, the same on every machine of a run. It starts in an empty folder of its own: give
    files by absolute paths."""
    of: dict[str, Any]
    """[task.of], the task whose instances it works on, and whose score counts unless there are [[task.reward]]s."""
    scored: Literal["message", "stdout", "agent"] = "message"
    """What is scored: the last message of the model, or what the program printed. agent: it says the reward itself."""
    reward: tuple[dict[str, Any], ...] = ()
    """[[task.reward]] tables, in place of the score of [task.of]."""
    time_limit: PositiveFloat = 300.0
    """Seconds after which the program is ended, and the attempt is cut; less than buffer.lease_timeout."""
    max_calls: PositiveInt = 64
    """Calls of the model that an attempt may make; at the next one it is cut."""


class Agent:
    """The task of [task.of], each attempt of which is played by a program."""

    Config: ClassVar[type[Section]] = AgentConfig

    def __init__(self, config: AgentConfig) -> None:
        if config.of.get("kind") == "agent":
            raise ConfigError(f'{WHERE}: [task.of] kind = "agent": give the task that the agent works on')
        if config.scored == "agent" and config.reward:
            raise ConfigError(f'{WHERE}: scored = "agent" has the program say the reward: remove the [[task.reward]]s')
        self.options = config
        self._of = load_task(config.of)
        self.rewards = load_rewards(config.reward) if config.reward else getattr(self._of, "rewards", None)
        self.reads_forward = getattr(self._of, "reads_forward", False)
        self._own_rewards = bool(config.reward)

    def size(self, split: Split) -> int | None:
        return self._of.size(split)

    def instance(self, split: Split, instance: int) -> Instance:
        return self._of.instance(split, instance)

    def score(self, instance: Instance, completion: str) -> Score:
        if self._own_rewards:
            assert self.rewards is not None
            score: Score = self.rewards.score(instance, completion)
            return score
        return self._of.score(instance, completion)

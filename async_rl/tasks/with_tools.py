"""Any task with tools: the model may call them turn by turn, and its first turn without a call is the answer that the
task judges.

    [task]
    kind = "tools"
    tools = ["calculator", "python", "my_module:my_function"]

    [task.of]
    kind = "gsm8k"
    path = "data/gsm8k"
"""

from __future__ import annotations

from typing import Any, ClassVar

from async_rl.schema import ConfigError, Section
from async_rl.tasks.environment import EpisodeConfig
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Instance, Score, Split
from async_rl.tasks.tools import Style, ToolEnvironment, load_tools


class ToolsConfig(EpisodeConfig, frozen=True, kw_only=True):
    tools: tuple[str, ...]
    """Names of tools that come with async-rl, or "module:function"."""
    of: dict[str, Any]
    """The [task] table of the questions, of any kind that asks once."""
    style: Style = "chat"
    """How calls are written (async_rl.tasks.tools); "plain" for a task of plain prompts."""


class WithTools:
    """Questions, answers and scores are the inner task's."""

    Config: ClassVar[type[Section]] = ToolsConfig

    def __init__(self, config: ToolsConfig) -> None:
        self.limits: EpisodeConfig = config
        self._style = config.style
        self._of = load_task(config.of)
        self.rewards = getattr(self._of, "rewards", None)
        self.reads_forward = getattr(self._of, "reads_forward", False)
        if hasattr(self._of, "environment"):
            raise ConfigError(
                f"[task.of] kind = {config.of.get('kind')!r}: a task with tools of its own cannot have more"
            )
        self._tools = load_tools(config.tools)
        self.tools = tuple(tool.schema for tool in self._tools)

    def size(self, split: Split) -> int | None:
        return self._of.size(split)

    def instance(self, split: Split, instance: int) -> Instance:
        return self._of.instance(split, instance)

    def environment(self) -> ToolEnvironment:
        return ToolEnvironment(self._tools, self._style, begin_within_s=self.limits.step_timeout / 2)

    def score(self, instance: Instance, completion: str) -> Score:
        return self._of.score(instance, completion)

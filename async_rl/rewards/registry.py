"""From [[task.reward]] tables to rewards, and to their weighted sum.

    [[task.reward]]
    kind = "math"

    [[task.reward]]
    kind = "format"
    pattern = "####"
    weight = 0.1

`kind` is one of KINDS: a new one is a file and a line here. Modules are imported only when asked for.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from async_rl.rewards.reward import Reward, RewardConfig, RewardError
from async_rl.schema import ConfigError, convert_section
from async_rl.tasks.task import Instance, Score

KINDS = {
    "exact": "async_rl.rewards.matching:Exact",
    "numeric": "async_rl.rewards.matching:Numeric",
    "format": "async_rl.rewards.matching:Format",
    "math": "async_rl.rewards.mathematics:Mathematics",
    "code": "async_rl.rewards.code:Code",
    "python": "async_rl.rewards.python_function:PythonFunction",
    "http": "async_rl.rewards.service:Service",
    "judge": "async_rl.rewards.judge:Judge",
}
MAX_REWARDS = 8  # their names travel with every attempt, in a space that is reserved for it


class Weighted(NamedTuple):
    name: str
    weight: float
    reward: Reward


class Rewards:
    """Σ weight · value, with every value recorded by its reward's name.

    `concurrency` is how many completions one worker may score at once (1, unless every reward that waits for a service
    allows more), `seconds` what they may take together beyond inference.score_timeout."""

    def __init__(self, parts: Sequence[Weighted]) -> None:
        self.parts = tuple(parts)
        self.concurrency = min((part.reward.concurrency for part in parts if part.reward.concurrency), default=1)
        self.seconds = math.fsum(part.reward.seconds for part in parts)

    def score(self, instance: Instance, completion: str) -> Score:
        """Raises RewardError, naming the reward, when one of them fails: there is no sum without all of its parts."""
        total, components = 0.0, {}
        for name, weight, reward in self.parts:
            try:
                value = reward.score(instance, completion)
                score = value if isinstance(value, Score) else Score(float(value), {})
                if not math.isfinite(score.reward):
                    raise RewardError(f"its value is {score.reward}")
            except RewardError as error:
                raise RewardError(f"reward {name!r}: {error}") from error
            except Exception as error:
                raise RewardError(f"reward {name!r}: {type(error).__name__}: {error}") from error
            total += weight * score.reward
            components[name] = score.reward
            components |= {f"{name}.{key}": float(each) for key, each in score.components.items()}
        return Score(total, components)


def load_rewards(tables: Sequence[Mapping[str, Any]]) -> Rewards:
    """The rewards of a task's [[task.reward]] tables. Raises ConfigError for none at all, a kind, key or value that is
    not known, and two of one name; AsyncRLError for an optional package that is missing."""
    if not 1 <= len(tables) <= MAX_REWARDS:
        raise ConfigError(
            f"[[task.reward]]: there must be 1 to {MAX_REWARDS} of them, and there are {len(tables)}: each is a table "
            f"with a `kind`, one of {', '.join(KINDS)}"
        )
    parts = [_load(table) for table in tables]
    for name, count in Counter(part.name for part in parts).items():
        if count > 1:
            raise ConfigError(f"[[task.reward]]: {count} of them are called {name!r}: give each a `name` of its own")
    return Rewards(parts)


def _load(table: Mapping[str, Any]) -> Weighted:
    kind = table.get("kind")
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(KINDS)}"
        raise ConfigError(f"[[task.reward]] kind = {kind!r} is not known: {advice}")
    where = f'[[task.reward]] of kind "{kind}"'
    module, _, name = KINDS[kind].partition(":")
    reward_class = getattr(importlib.import_module(module), name)
    config: RewardConfig = convert_section(table, reward_class.Config, where)
    if not math.isfinite(config.weight):
        raise ConfigError(f"{where}: weight = {config.weight} is no number to multiply with")
    return Weighted(config.name or kind, config.weight, reward_class(config))

"""The contract of a reward: one view of a completion, as a number.

A reward is made from its table in [[task.reward]] and then asked for one completion after the other, in a scoring
worker (and only there: a node or a buffer that loads the task makes rewards, and asks none). It may be slow, hang, or
crash: the worker has time-outs, and an attempt that cannot be scored is tried again, never worth 0.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Protocol

from msgspec import Meta

from async_rl.errors import AsyncRLError
from async_rl.schema import Section
from async_rl.tasks.task import Instance, Score

Name = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$")]


class RewardError(AsyncRLError):
    """A reward that cannot be had for one completion: the attempt is scored again, then dropped with this reason."""


class RewardConfig(Section, frozen=True, kw_only=True):
    """What every [[task.reward]] table may have; a kind's own options are fields of a subclass."""

    kind: str
    weight: float = 1.0
    """By which the value counts in the sum; 0 only records it."""
    name: Name | None = None
    """Of its component in the metrics; the kind, where it has none."""


class Reward(Protocol):
    """A class with an options type named `Config`, made from one: `RewardClass(config)`. Making it reads no file that
    is large and asks no service: every pool that loads the task does it."""

    Config: ClassVar[type[RewardConfig]]

    concurrency: int
    """How many completions one worker may ask it for at once, each in a thread of its own; 0: as many as the others
    allow, since it waits for nobody."""
    seconds: float
    """That one completion may take beyond what scoring is given anyway (inference.score_timeout); 0: none."""

    def score(self, instance: Instance, completion: str) -> float | Score:
        """The value, finite and not weighted; with components of its own they are recorded as NAME.COMPONENT. What it
        raises is a failure to score, never a 0."""

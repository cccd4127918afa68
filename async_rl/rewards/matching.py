"""Rewards that compare text: exactly, as numbers, or with a pattern."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

from async_rl.rewards.extraction import Extract, expression, extractor, number_of
from async_rl.rewards.reward import RewardConfig
from async_rl.schema import ConfigError, NonNegative
from async_rl.tasks.task import Instance


class ExactConfig(RewardConfig, frozen=True, kw_only=True):
    extract: Extract | None = None
    """Where the answer stands; "whole" when neither this nor a pattern says."""
    pattern: str = ""
    """A regular expression in place of `extract`: the answer is its last match (its group, where it has one)."""
    case: bool = True
    """Whether upper and lower case differ."""


class Exact:
    """1 when the completion's answer is the instance's, white space aside (however much is as good as one space), else
    0. An instance's answer without what is looked for (a mark, a box, a match) is taken whole."""

    Config: ClassVar[type[RewardConfig]] = ExactConfig
    concurrency = 0
    seconds = 0.0

    def __init__(self, config: ExactConfig) -> None:
        self._extract = extractor(config.extract, config.pattern, "whole", '[[task.reward]] of kind "exact"')
        self._case = config.case

    def score(self, instance: Instance, completion: str) -> float:
        said = self._extract(completion)
        right = str(instance.answer)
        return float(said is not None and self._plain(said) == self._plain(self._extract(right) or right))

    def _plain(self, text: str) -> str:
        return " ".join((text if self._case else text.casefold()).split())


class NumericConfig(RewardConfig, frozen=True, kw_only=True):
    extract: Extract | None = None
    """Where the answer stands; "auto" when neither this nor a pattern says."""
    pattern: str = ""
    """A regular expression in place of `extract`, as with kind "exact"."""
    relative: NonNegative = 0.0
    """How far off the answer may be, as a part of the right one."""
    absolute: NonNegative = 0.0
    """The same, as a number; the wider of the two holds."""


class Numeric:
    """1 when the completion's answer is a number, and the right one within the tolerance, else 0."""

    Config: ClassVar[type[RewardConfig]] = NumericConfig
    concurrency = 0
    seconds = 0.0

    def __init__(self, config: NumericConfig) -> None:
        self._extract = extractor(config.extract, config.pattern, "auto", '[[task.reward]] of kind "numeric"')
        if not math.isfinite(config.relative + config.absolute):
            raise ConfigError('[[task.reward]] of kind "numeric": an endless tolerance tells nothing apart')
        self._relative, self._absolute = Fraction(config.relative), Fraction(config.absolute)

    def score(self, instance: Instance, completion: str) -> float:
        text = str(instance.answer)
        right = number_of(self._extract(text) or text)
        if right is None:
            raise ValueError(f"the instance's answer is no number: {text[-80:]!r}")
        said = number_of(self._extract(completion) or "")
        return float(said is not None and abs(said - right) <= max(self._absolute, self._relative * abs(right)))


class FormatConfig(RewardConfig, frozen=True, kw_only=True):
    pattern: str
    """A regular expression, of which `.` is any character, a line's end too."""
    whole: bool = False
    """Whether it must match all of the completion, or be found somewhere in it."""


class Format:
    """1 when the completion has the form that a regular expression asks for, else 0."""

    Config: ClassVar[type[RewardConfig]] = FormatConfig
    concurrency = 0
    seconds = 0.0

    def __init__(self, config: FormatConfig) -> None:
        if not config.pattern:
            raise ConfigError('[[task.reward]] of kind "format": an empty pattern is found everywhere')
        pattern = expression(config.pattern, '[[task.reward]] of kind "format"')
        self._find = pattern.fullmatch if config.whole else pattern.search

    def score(self, instance: Instance, completion: str) -> float:
        return float(self._find(completion) is not None)

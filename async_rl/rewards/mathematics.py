r"""Mathematical answers (GSM8K, MATH, AIME): the right value, however it is written.

The answer is taken from behind the last `####` or out of the last `\boxed{…}` first, and only then compared: as text,
then as a number, and last by math-verify (Apache-2.0), which knows that 2√2 is √8. That runs in a process of its own
(`async_rl/rewards/equivalence.py`) under our own time-out, since algebra on what a model writes may take for ever.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import ClassVar

from async_rl.errors import AsyncRLError
from async_rl.rewards.equivalence import Comparer
from async_rl.rewards.extraction import Extract, extractor, number_of
from async_rl.rewards.reward import RewardConfig
from async_rl.schema import PositiveInt
from async_rl.tasks.task import Instance, Score

MAX_CHARACTERS = 1000  # of an answer: a longer one is none
WORD = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")


class MathConfig(RewardConfig, frozen=True, kw_only=True):
    extract: Extract | None = None
    """Where the answer stands; "auto" when neither this nor a pattern says."""
    pattern: str = ""
    """A regular expression in place of `extract`: the answer is its last match (its group, where it has one)."""
    timeout: PositiveInt = 5
    """Seconds of processor time, which a busy machine does not shorten, that comparing two answers may take; beyond
    them they are not equal."""


class Mathematics:
    """1 when the completion gives the instance's answer, else 0. Components: `answered`, whether it gave one at all;
    `timed_out`, whether comparing took too long."""

    Config: ClassVar[type[RewardConfig]] = MathConfig
    concurrency = 0

    def __init__(self, config: MathConfig) -> None:
        if find_spec("math_verify") is None:
            raise AsyncRLError(
                '[[task.reward]] kind = "math" needs a package that is not installed here (math_verify): '
                "pip install '.[tasks]' in the checkout"
            )
        self._extract = extractor(config.extract, config.pattern, "auto", '[[task.reward]] of kind "math"')
        self._comparer = Comparer(config.timeout)
        self.seconds = self._comparer.seconds

    def score(self, instance: Instance, completion: str) -> Score:
        said = self._extract(completion)
        if said is None or len(said) > MAX_CHARACTERS:
            return Score(0.0, {"answered": 0.0, "timed_out": 0.0})
        text = str(instance.answer)
        equal = self._equal(self._extract(text) or text.strip(), said)
        return Score(float(equal is True), {"answered": 1.0, "timed_out": float(equal is None)})

    def _equal(self, right: str, said: str) -> bool | None:
        """None when that took too long to find out."""
        if plain(right) == plain(said):
            return True
        numbers = number_of(right), number_of(said)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return self._comparer.equal(right, said)


def plain(text: str) -> str:
    """Text without what only sets it: white space, dollar signs, a full stop at the end, the name of a typeface."""
    text = WORD.sub(r"\1", text).replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("\\,", "")
    return "".join(text.replace("$", "").split()).removesuffix(".").replace("dfrac", "frac").replace("tfrac", "frac")

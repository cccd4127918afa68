"""Sort the digits of a number: `48213907=` is to be continued with `01234789`.

Small enough for a model of half a million parameters to learn on one CPU core, hard enough that it takes a while.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Annotated, ClassVar

from msgspec import Meta

from async_rl.schema import Count, Section
from async_rl.tasks.task import Instance, Score, Split

EVAL_BYTES = 32  # of 256: an eighth of all digit strings is kept for evaluation and never trained on


class DigitSortConfig(Section, frozen=True, kw_only=True):
    # With 2 digits both splits have instances; 32 digits still come out of one 256-bit hash without a visible bias.
    digits: Annotated[int, Meta(ge=2, le=32)] = 8
    size: Count = 0
    """How many instances to train on; 0 is no end of them."""


class DigitSort:
    """Reward 1 for exactly the sorted digits, else 0; component `positions` is the fraction of right positions."""

    Config: ClassVar[type[Section]] = DigitSortConfig

    def __init__(self, config: DigitSortConfig) -> None:
        self.digits = config.digits
        self._size = config.size or None

    def size(self, split: Split) -> int | None:
        return self._size if split == "train" else None

    def instance(self, split: Split, instance: int) -> Instance:
        # Drawn again until it falls into the split: the digits alone decide, so no string is in both.
        for attempt in itertools.count():
            seed = f"digit_sort {split} {instance} {attempt}".encode()
            number = int.from_bytes(hashlib.blake2b(seed, digest_size=32).digest(), "little") % 10**self.digits
            digits = f"{number:0{self.digits}d}"
            if split_of(digits) == split:
                break
        return Instance(prompt=f"{digits}=", messages=None, answer="".join(sorted(digits)))

    def score(self, instance: Instance, completion: str) -> Score:
        answer: str = instance.answer
        right = sum(a == b for a, b in zip(answer, completion, strict=False))
        return Score(float(completion == answer), {"positions": right / max(len(answer), len(completion))})


def split_of(digits: str) -> Split:
    """To which split a string of digits belongs."""
    byte = hashlib.blake2b(f"digit_sort {digits}".encode(), digest_size=1).digest()[0]
    return "eval" if byte < EVAL_BYTES else "train"

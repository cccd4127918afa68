"""Any generator of reasoning-gym (Apache-2.0), with its own verifier, as a task.

Training takes entries [0, size) of the generator's dataset, evaluation the `eval_size` after them. Each entry has a
random state of its own, so no entry is in both; a generator that knows only few questions may still ask one twice.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from typing import Any, ClassVar, Literal

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.schema import ConfigError, Count, PositiveInt, Section
from async_rl.tasks.task import Instance, Score, Split

Style = Literal["chat", "plain"]

INSTRUCTION = "Think it through, then write only the final answer between <answer> and </answer>."
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
COMPOUND = frozenset({"composite"})  # generators of generators: they need a list of others
# These walk over sets of strings, whose order differs from process to process (found by making all entries twice), so
# the scoring worker would judge the answer to another question than the node asked.
HASH_ORDERED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
# What verifiers raise about an answer that is no number, list or formula where they expect one: it is wrong then.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)
CACHED_ENTRIES = 256  # the samples of a group ask for the same entry


class GymConfig(Section, frozen=True, kw_only=True):
    name: str
    """The generator, for example "chain_sum"."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """The generator's own settings, for example {min_terms = 2, max_terms = 3}."""
    size: PositiveInt = 100_000
    eval_size: PositiveInt = 1000
    seed: Count = 0
    style: Style = "chat"
    """chat: a user message that asks for the answer between tags. plain: the question and a new line; the whole
    completion is the answer (for base models)."""


class ReasoningGym:
    """Reward: the verifier's score in [0, 1]. Component `format` says whether there was an answer that
    it could judge."""

    Config: ClassVar[type[Section]] = GymConfig

    def __init__(self, config: GymConfig) -> None:
        self.config = config
        self._dataset = _dataset(config)
        self._entry = functools.lru_cache(CACHED_ENTRIES)(self._dataset.__getitem__)

    def size(self, split: Split) -> int | None:
        return self.config.size if split == "train" else self.config.eval_size

    def instance(self, split: Split, instance: int) -> Instance:
        index = instance if split == "train" else self.config.size + instance
        entry = self._entry(index)
        question: str = entry["question"]
        if self.config.style == "plain":
            return Instance(prompt=f"{question}\n", messages=None, answer=entry["answer"], data=index)
        message = {"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}
        return Instance(prompt=None, messages=(message,), answer=entry["answer"], data=index)

    def score(self, instance: Instance, completion: str) -> Score:
        answer = completion.strip() if self.config.style == "plain" else tagged_answer(completion)
        if not answer:
            return Score(0.0, {"format": 0.0})
        try:
            return Score(float(self._dataset.score_answer(answer, self._entry(instance.data))), {"format": 1.0})
        except UNREADABLE:
            return Score(0.0, {"format": 0.0})


def tagged_answer(completion: str) -> str | None:
    """What stands in the last complete pair of answer tags, or None."""
    found = TAGGED.findall(completion)
    return found[-1].strip() if found else None


def _dataset(config: GymConfig) -> Any:
    """The generator's dataset of both splits. Raises ConfigError, or AsyncRLError when the package is missing."""
    try:
        # Here and not above: the package is optional, and slow to import.
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise AsyncRLError(
            f'[task] kind = "reasoning_gym" needs a package that is not installed here ({error.name}): '
            "pip install '.[tasks]' in the checkout"
        ) from error
    where = f'[task] of kind "reasoning_gym", name = {config.name!r}'
    if config.name in COMPOUND:
        raise ConfigError(f"{where}: this generator mixes others and cannot be configured here; name one of them")
    if config.name in HASH_ORDERED and sys.flags.hash_randomization:
        raise ConfigError(
            f"{where}: this generator's questions depend on Python's string hashing: set PYTHONHASHSEED=0 in the "
            "environment of every node"
        )
    if config.name not in DATASETS:
        near = difflib.get_close_matches(config.name, DATASETS, n=3)
        raise ConfigError(f"{where}: reasoning-gym has no such generator. {_advice(near, len(DATASETS))}")
    reserved = {"seed", "size"} & config.options.keys()
    if reserved:
        raise ConfigError(f"{where}: `{min(reserved)}` belongs in [task] itself, not in options")
    try:
        return reasoning_gym.create_dataset(
            config.name, seed=config.seed, size=config.size + config.eval_size, **config.options
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{where}: options = {config.options} are refused: {error}") from error


def _advice(near: list[str], known: int) -> str:
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else f"It has {known}; see its README for the list."

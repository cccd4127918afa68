"""Kind "dataset": instances are the rows of data sources, scored by rewards of one's choice.

Training goes through the sources in the order of async_rl.data.order, and evaluation through what each keeps for it,
interleaved in proportion and in a fixed shuffled order (a stream in its own), so that the first few hundred stand for
all. A row's number in its source is its place among those that the filters leave: ids mean the same on every machine
that has the same data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from async_rl.data.order import Source, asked, place_of, shares
from async_rl.data.source import Row, Rows, SourceConfig, check_source, open_rows
from async_rl.rewards import load_rewards
from async_rl.schema import ConfigError, Section
from async_rl.tasks.task import Instance, Score, Split, TaskError

EVAL_SEED = 0
EXACT: tuple[dict[str, Any], ...] = ({"kind": "exact"},)


class DatasetConfig(Section, frozen=True, kw_only=True):
    source: tuple[SourceConfig, ...]
    """[[task.source]] tables: at least one."""
    style: Literal["chat", "plain"] = "chat"
    """chat: the prompt is what a user says. plain: it is a text that the model goes on with, for base models."""
    system: str = ""
    """With style "chat": what a system message says before it."""
    instruction: str = ""
    """A text behind every prompt, after an empty line; in style "plain" directly behind it."""
    reward: tuple[dict[str, Any], ...] = ()
    """[[task.reward]] tables; without any, a completion is right that is exactly the answer."""


class DatasetTask:
    """`sources` is asked by who orders instances, without making a task."""

    Config: ClassVar[type[Section]] = DatasetConfig

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self.rewards = load_rewards(config.reward or EXACT)
        self._sources = self.sources(config)
        self._train = [_opened(source, "train") for source in config.source]
        evaluated = [(source, open_rows(source, "eval", _where(source))) for source in config.source]
        self._evaluated = [(source, rows) for source, rows in evaluated if rows is not None]
        self._eval_sources = [Source(rows.size, rows.size, int(source.streaming)) for source, rows in self._evaluated]

    @property
    def reads_forward(self) -> bool:
        return any(source.streaming for source in self.config.source)

    @staticmethod
    def sources(config: DatasetConfig) -> tuple[Source, ...]:
        """How many training instances each source has, and its part of the tickets. Looks at the data of those alone
        that have no `size`. Raises ConfigError, and AsyncRLError when the library is needed and missing."""
        if not config.source:
            raise ConfigError('[task] of kind "dataset" needs a table [[task.source]] with a `path` or a `name`')
        if config.style == "plain" and (config.system or any(source.messages for source in config.source)):
            raise ConfigError(
                '[task] of kind "dataset": style = "plain" asks in plain text, without `system` or `messages`: remove '
                'these, or set style = "chat"'
            )
        for source in config.source:
            check_source(source, _where(source))
        without = next((source for source in config.source if not source.answer and not config.reward), None)
        if without is not None:
            raise ConfigError(
                f"{_where(without)}: has no `answer`, the column of right answers, and there is no [[task.reward]] "
                "that could do without one: give either"
            )
        weights = [source.weight for source in config.source]
        given = [weight for weight in weights if weight is not None]
        if given and len(given) < len(weights):
            missing = config.source[weights.index(None)]
            raise ConfigError(f"{_where(missing)}: has no weight, and others have one: give all of them one, or none")
        sizes = [source.size or _counted(source) for source in config.source]
        return tuple(
            Source(size, share, source.block if source.streaming else 0)
            for size, share, source in zip(sizes, shares(given or sizes), config.source, strict=True)
        )

    def size(self, split: Split) -> int | None:
        return sum(source.size for source in (self._sources if split == "train" else self._eval_sources))

    def instance(self, split: Split, instance: int) -> Instance:
        if split == "train":
            number, row = place_of(self._sources, instance)
            return self._instance(self.config.source[number], self._train[number][row])
        number, row = place_of(self._eval_sources, asked(EVAL_SEED, self._eval_sources, instance))
        source, rows = self._evaluated[number]
        return self._instance(source, rows[row])

    def score(self, instance: Instance, completion: str) -> Score:
        return self.rewards.score(instance, completion)

    def _instance(self, source: SourceConfig, row: Row) -> Instance:
        answer = row[source.answer] if source.answer else None
        data = {column: row[column] for column in source.data} or None
        if source.messages:
            return Instance(None, self._with_system(_messages(source, row[source.messages])), answer, data)
        prompt = row[source.prompt]
        if not isinstance(prompt, str):
            raise TaskError(f"{_where(source)}: column {source.prompt!r} has {prompt!r}, which is no text")
        instruction = self.config.instruction
        if self.config.style == "plain":
            return Instance(prompt + instruction, None, answer, data)
        content = f"{prompt}\n\n{instruction}" if instruction else prompt
        return Instance(None, self._with_system([{"role": "user", "content": content}]), answer, data)

    def _with_system(self, messages: Sequence[dict[str, str]]) -> tuple[dict[str, str], ...]:
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return (*system, *messages)


def _messages(source: SourceConfig, value: Any) -> list[dict[str, str]]:
    """Chat messages as a template takes them: what a table fills up with nothing is left out."""
    try:
        messages = [{key: text for key, text in each.items() if text is not None} for each in value]
    except (TypeError, AttributeError):
        messages = []
    if not messages or not all({"role", "content"} <= each.keys() for each in messages):
        raise TaskError(
            f"{_where(source)}: column {source.messages!r} has {value!r}: a list of messages with role and content was "
            "expected; a column of plain text is `prompt`"
        )
    return messages


def _where(source: SourceConfig) -> str:
    return f"[[task.source]] {source.path or source.name or 'without path and name'!r}"


def _opened(source: SourceConfig, split: Literal["train", "eval"]) -> Rows:
    rows = open_rows(source, split, _where(source))
    assert rows is not None  # of training there always are some
    return rows


@functools.lru_cache
def _counted(source: SourceConfig) -> int:
    """How many rows there are to train on: looked at once, since everybody who checks a config asks."""
    return _opened(source, "train").size

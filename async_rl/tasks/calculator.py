"""Sums of two numbers with a calculator: an example of a task with a tool, for a model of half a million parameters.

    prompt       482+917=
    the model    [calculator 482+917]
    the tool     1399
    the model    1399

It has to call the tool as it is called, and then to use what comes back, instead of saying a number at once.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from async_rl.schema import NonNegative, Section
from async_rl.tasks.environment import EpisodeConfig
from async_rl.tasks.task import Instance, Score, Split
from async_rl.tasks.tools import Style, ToolEnvironment, ToolError, tool_of

EVAL_BYTES = 32  # of 256: an eighth of all sums is kept for evaluation and never trained on
MAX_EXPRESSION = 200  # characters
WRITTEN = re.compile(r"[\d\s.+\-*/%()]+")  # Python's own reader would warn of what else looks like a number
MAX_POWER = 64
MAX_DIGITS = 100
NO_ARITHMETIC = "an expression has numbers, + - * / // % ** and parentheses, and nothing else"
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}  # fmt: skip


def calculator(expression: Annotated[str, Meta(description="for example (17 + 4) * 2")]) -> str:
    """The value of an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"an expression of more than {MAX_EXPRESSION} characters")
    if not WRITTEN.fullmatch(expression):
        raise ToolError(NO_ARITHMETIC)
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ToolError(NO_ARITHMETIC) from None
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise ToolError(str(error)) from None
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(b) > MAX_POWER:
                raise ToolError(f"a power above {MAX_POWER}")
            return _bounded(OPERATORS[type(op)](a, b))
    raise ToolError(NO_ARITHMETIC)


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or (isinstance(value, int) and abs(value) >= 10**MAX_DIGITS):
        raise ToolError(f"no real number of at most {MAX_DIGITS} digits")
    return value  # type: ignore[no-any-return]


class CalculatorConfig(EpisodeConfig, frozen=True, kw_only=True):
    digits: Annotated[int, Meta(ge=1, le=16)] = 2
    """Of each number."""
    style: Style = "plain"
    call_reward: NonNegative = 0.0
    """For the first turn, if the calculator was asked for the sum and nothing else."""
    shown_calls: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Of the answers that the tiny model is shown in its warm start, those that ask the calculator; the others say the
    sum at once, which it cannot learn so soon. What it then has to find out is that asking pays."""


class Calculator:
    """Reward 1 for exactly the sum, else 0, and call_reward for having asked for it. Component `right` is whether the
    answer was right."""

    Config: ClassVar[type[Section]] = CalculatorConfig

    def __init__(self, config: CalculatorConfig) -> None:
        self.limits: EpisodeConfig = config
        self._config = config
        self._tool = tool_of(calculator)
        self.tools = (self._tool.schema,)

    def size(self, split: Split) -> int | None:
        return None

    def instance(self, split: Split, instance: int) -> Instance:
        a, b = _numbers(split, instance, self._config.digits)
        total = str(a + b)
        if self._config.style == "plain":
            shown = _byte(f"shown {a} {b}") < 256 * self._config.shown_calls
            turns = [f"[calculator {a}+{b}]", f"{total}\n", total] if shown else [total]
            return Instance(f"{a}+{b}=", None, turns, total)
        question = f"What is {a} + {b}? Ask the calculator, then answer with the number alone."
        return Instance(None, ({"role": "user", "content": question},), total, total)

    def environment(self) -> ToolEnvironment:
        return ToolEnvironment([self._tool], self._config.style, self._worth())

    def _worth(self) -> Callable[[Instance, Sequence[str]], float]:
        """For one attempt: only its first turn may earn something."""
        turns = itertools.count()
        reward = self._config.call_reward

        def worth(instance: Instance, results: Sequence[str]) -> float:
            return reward if next(turns) == 0 and list(results) == [instance.data] else 0.0

        return worth

    def score(self, instance: Instance, completion: str) -> Score:
        right = float(completion.strip() == instance.data)
        return Score(right, {"right": right})


def _numbers(split: Split, instance: int, digits: int) -> tuple[int, int]:
    """Drawn again until they fall into the split: the two numbers alone decide, so no sum is in both."""
    attempt = 0
    while True:
        seed = f"calculator {split} {instance} {attempt}".encode()
        drawn = int.from_bytes(hashlib.blake2b(seed, digest_size=32).digest(), "little")
        low, count = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
        a, b = low + drawn % count, low + (drawn >> 128) % count
        if (_byte(f"calculator {a} {b}") < EVAL_BYTES) == (split == "eval"):
            return a, b
        attempt += 1


def _byte(text: str) -> int:
    """0 to 255, by chance but always the same."""
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]

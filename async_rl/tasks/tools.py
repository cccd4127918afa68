"""Tools that a model may call in its turns: typed Python functions, told to it as schemas, called by what it writes.

    def calculator(expression: str) -> str:
        \"\"\"The value of an arithmetic expression.\"\"\"

is told to a chat template as {"type": "function", "function": {"name": "calculator", "description": …, …}}. A call is
written in one of two ways:

    chat    <tool_call>{"name": "calculator", "arguments": {"expression": "2*21"}}</tool_call>    (Hermes, Qwen)
    plain   [calculator 2*21]                  for base models; the words are the only argument, or the first

Whatever goes wrong in a call (no such tool, arguments that do not fit, an exception) is what the model sees next, and
no failure of the environment.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_type_hints

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.imports import imported
from async_rl.schema import ConfigError
from async_rl.tasks.environment import Observation, Said, StepResult
from async_rl.tasks.task import Instance

Style = Literal["chat", "plain"]

TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BRACKETED = re.compile(r"\[(\w+) ([^\[\]\n]*)\]")
MAX_RESULT = 4000  # characters of a result that a model is shown
MAX_CALLS = 16  # in one turn
TOOLS = {
    "calculator": "async_rl.tasks.calculator:calculator",
    "python": "async_rl.tasks.python_tool:python",
}


class ToolError(Exception):
    """What is wrong with a call, in words for the model."""


class Tool(NamedTuple):
    """A function and its arguments' struct, from which the schema is made and by which calls are checked."""

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]


class ToolCall(NamedTuple):
    """`arguments` are those of a chat call by name, or a plain one's words."""

    name: str
    arguments: Mapping[str, Any] | str


def tool_of(function: Callable[..., Any]) -> Tool:
    """A tool from a function whose parameters all have types (Annotated[T, msgspec.Meta(description=…)] describes one);
    its docstring is the description. Raises ConfigError."""
    name = function.__name__
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name}: its parameter `{parameter.name}` has no type: annotate it")
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    try:
        _, components = msgspec.json.schema_components((arguments,), ref_template="#/$defs/{name}")
    except TypeError as error:
        raise ConfigError(f"tool {name}: a parameter's type cannot be told to a model: {error}") from error
    parameters = {key: value for key, value in components.pop(name).items() if key != "title"}
    if components:
        parameters["$defs"] = components
    described = inspect.getdoc(function) or ""
    schema = {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}
    return Tool(name, schema, function, arguments)


def load_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """By the names of those that come with async-rl, or "module:function". Raises ConfigError."""
    tools = []
    for name in names:
        path = TOOLS.get(name, name)
        if ":" not in path:
            raise ConfigError(f'[task] tools: unknown tool {name!r}: {", ".join(TOOLS)}, or "module:function"')
        function = imported(path, f"[task] tools: {name!r}")
        try:
            tools.append(tool_of(function))
        except (AttributeError, ValueError) as error:  # no function, or one without a signature
            raise ConfigError(f"[task] tools: {name!r} is no function that a tool can be made of: {error}") from error
    return tuple(tools)


def calls_in(text: str, style: Style) -> Sequence[ToolCall | ToolError]:
    """What a turn calls, in order; a call that cannot be read is its error."""
    if style == "plain":
        return [ToolCall(found[1], found[2]) for found in BRACKETED.finditer(text)][:MAX_CALLS]
    return [_tagged(found) for found in TAGGED.findall(text)][:MAX_CALLS]


def _tagged(written: str) -> ToolCall | ToolError:
    try:
        call = msgspec.json.decode(written.strip(), type=dict[str, Any])
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):  # some write them as JSON within JSON
            arguments = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        return ToolError(f"this is no JSON object with name and arguments: {error}")
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return ToolError("a call needs a name, and arguments as an object")
    return ToolCall(call["name"], arguments)


async def called(tools: Mapping[str, Tool], call: ToolCall | ToolError) -> str:
    """The call's result, or what is wrong with it, as the model sees it."""
    try:
        if isinstance(call, ToolError):
            raise call
        if call.name not in tools:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(tools)}")
        tool = tools[call.name]
        arguments = _checked(tool, call.arguments)
        if inspect.iscoroutinefunction(tool.function):
            result = await tool.function(**arguments)
        else:
            result = await asyncio.to_thread(tool.function, **arguments)
    except ToolError as error:
        return f"error: {error}"
    except AsyncRLError:  # of this machine's (a sandbox that it cannot have), and no fault of the model's
        raise
    except Exception as error:  # of the tool's own: the model is told, as it would be told by a shell
        return f"error: {type(error).__name__}: {error}"[:MAX_RESULT]
    text = result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}… ({len(text)} characters)"


def _checked(tool: Tool, given: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, str):
        first = tool.arguments.__struct_fields__[:1]
        if not first:
            raise ToolError(f"{tool.name} takes no argument")
        given = {first[0]: given}
        strict = False
    else:
        strict = True
    try:
        arguments = msgspec.convert(given, tool.arguments, strict=strict)
    except msgspec.ValidationError as error:
        raise ToolError(f"the arguments of {tool.name} do not fit: {error}") from None
    return {name: getattr(arguments, name) for name in arguments.__struct_fields__}


class ToolEnvironment:
    """An environment in which a turn without a call is the final answer, which the task's `score` judges. `worth` says
    what a turn with calls earns by their results. A call that has not begun `begin_within_s` after its turn is refused:
    how many slow ones there are in a turn is the model's doing, and no failure of its world."""

    def __init__(
        self,
        tools: Sequence[Tool],
        style: Style,
        worth: Callable[[Instance, Sequence[str]], float] | None = None,
        begin_within_s: float = math.inf,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._style: Style = style
        self._worth = worth
        self._begin_within_s = begin_within_s
        self._instance: Instance | None = None

    async def reset(self, instance: Instance, seed: int) -> Observation:
        self._instance = instance
        return instance.messages if instance.prompt is None else instance.prompt  # type: ignore[return-value]

    async def step(self, said: Said) -> StepResult:
        calls, started = calls_in(said.text, self._style), time.monotonic()
        if not calls:
            return StepResult("", done=True, answer=said.text)
        results = [await self._called(call, time.monotonic() - started) for call in calls]
        errors = sum(result.startswith("error: ") for result in results)
        reward = 0.0 if self._worth is None or self._instance is None else self._worth(self._instance, results)
        components = {"calls": float(len(calls)), "call_errors": float(errors)}
        return StepResult(self._shown(calls, results), reward, components=components)

    async def _called(self, call: ToolCall | ToolError, passed_s: float) -> str:
        if passed_s > self._begin_within_s:
            return "error: not called, as the calls before it took too long"
        return await called(self._tools, call)

    def _shown(self, calls: Sequence[ToolCall | ToolError], results: Sequence[str]) -> Observation:
        if self._style == "plain":
            return "".join(f"{result}\n" for result in results)
        names = [{"name": call.name} if isinstance(call, ToolCall) else {} for call in calls]
        return [{"role": "tool", **name, "content": result} for name, result in zip(names, results, strict=True)]

    async def close(self) -> None:
        pass

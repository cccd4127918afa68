"""Tools: what a model is told of a function, how its calls are read, and that a bad call is an observation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.schema import ConfigError
from async_rl.tasks.calculator import Calculator, CalculatorConfig, calculator
from async_rl.tasks.environment import EnvironmentTask, Said
from async_rl.tasks.registry import load_task
from async_rl.tasks.tools import MAX_RESULT, ToolCall, ToolEnvironment, ToolError, called, calls_in, load_tools, tool_of


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """What the weather will be."""
    if city == "Atlantis":
        raise LookupError("it sank")
    return {"city": city, "days": days, "unit": unit}


async def slow_echo(words: str) -> str:
    await asyncio.sleep(0)
    return words


TOOLS = {tool.name: tool for tool in map(tool_of, (weather, slow_echo, calculator))}


def result(call: ToolCall | ToolError) -> str:
    return asyncio.run(called(TOOLS, call))


def test_a_typed_function_becomes_a_schema() -> None:
    schema = TOOLS["weather"].schema["function"]
    assert (schema["name"], schema["description"]) == ("weather", "What the weather will be.")
    assert schema["parameters"]["required"] == ["city"]
    assert schema["parameters"]["properties"]["days"] == {"type": "integer", "default": 1}
    assert schema["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]
    assert TOOLS["calculator"].schema["function"]["parameters"]["properties"]["expression"]["description"]


def test_a_function_without_types_is_no_tool() -> None:
    def untyped(a, b: int):  # type: ignore[no-untyped-def]
        return a

    with pytest.raises(ConfigError, match="`a` has no type"):
        tool_of(untyped)
    with pytest.raises(ConfigError, match="unknown tool 'abacus'"):
        load_tools(["abacus"])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tools(["async_rl.tasks.tools:nothing"])
    assert [tool.name for tool in load_tools(["calculator", "python"])] == ["calculator", "python"]


def test_calls_of_a_chat_model_are_read_in_order_and_checked() -> None:
    text = (
        'hm <tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call> and '
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'
    )
    first, second = calls_in(text, "chat")
    assert result(first) == '{"city":"Rome","days":2,"unit":"C"}'
    assert result(second) == '{"city":"Oslo","days":1,"unit":"C"}'
    assert calls_in("no call at all", "chat") == []


def test_calls_of_a_base_model_are_words_in_brackets() -> None:
    assert calls_in("see [calculator 2*(3+4)], [slow_echo a b]", "plain") == [
        ToolCall("calculator", "2*(3+4)"),
        ToolCall("slow_echo", "a b"),
    ]
    assert result(ToolCall("calculator", "2*(3+4)")) == "14"
    assert result(ToolCall("slow_echo", "a b")) == "a b"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("<tool_call>{</tool_call>", "no JSON object"),
        ("<tool_call>[1]</tool_call>", "no JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "needs a name"),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "as an object"),
        ('<tool_call>{"name": "wether", "arguments": {}}</tool_call>', "there is no tool 'wether', only weather"),
        ('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "missing required field `city`"),
        ('<tool_call>{"name": "weather", "arguments": {"city": 3}}</tool_call>', "Expected `str`"),
        ('<tool_call>{"name": "weather", "arguments": {"city": "a", "when": 1}}</tool_call>', "unknown field `when`"),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Atlantis"}}</tool_call>', "LookupError: it sank"),
    ],
)
def test_what_is_wrong_with_a_call_is_what_the_model_sees(written: str, says: str) -> None:
    (call,) = calls_in(written, "chat")
    assert result(call).startswith("error: ")
    assert says in result(call)


def test_a_long_result_is_cut() -> None:
    assert len(result(ToolCall("slow_echo", "x" * 10_000))) < MAX_RESULT + 50


# --- the calculator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("17+25", "42"), ("(1+2)*-3", "-9"), ("7/2", "3.5"), ("7//2", "3"), ("2**10", "1024"), ("0.1+0.2", "0.3")],
)
def test_it_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "a+b", "__import__('os')", "9**9**9", "2**1000", "1/0", "(-8)**0.5", "1" * 201, "12or 3", "[1]", "1,2"],
)
def test_it_refuses_what_is_no_arithmetic_or_too_much(expression: str) -> None:
    with pytest.raises(ToolError):
        calculator(expression)


@given(st.text(alphabet="0123456789+-*/.%() ", max_size=30))
@settings(deadline=None, max_examples=200)
def test_whatever_is_written_it_answers_or_says_why_not(expression: str) -> None:
    shown = result(ToolCall("calculator", expression))
    assert shown.startswith("error: ") or float(shown) == float(shown)


# --- the tasks -------------------------------------------------------------------------------------------------------


def played(task: Any, split: Any, number: int, *turns: str) -> list[Any]:
    async def play() -> list[Any]:
        environment = task.environment()
        opening = await environment.reset(task.instance(split, number), 0)
        steps = [await environment.step(Said(turn, (), "stop")) for turn in turns]
        await environment.close()
        return [opening, *steps]

    return asyncio.run(play())


def test_the_examples_own_answer_is_played_to_its_end_and_right() -> None:
    task = Calculator(CalculatorConfig(digits=3, call_reward=0.25, shown_calls=1.0))
    assert isinstance(task, EnvironmentTask)
    for number in range(20):
        instance = task.instance("train", number)
        call, shown, answer = instance.answer
        first, second, third = played(task, "train", number, call, answer)
        assert first == instance.prompt
        assert (second.observation, second.reward, second.done) == (shown, 0.25, False)
        assert (third.done, third.answer, third.reward) == (True, answer, 0.0)
        assert task.score(instance, third.answer).reward == 1.0
        assert task.score(instance, "7").reward == 0.0


def test_as_many_calls_are_shown_as_are_asked_for() -> None:
    for share in (0.0, 0.5, 1.0):
        task = Calculator(CalculatorConfig(shown_calls=share))
        turns = [len(task.instance("train", number).answer) for number in range(400)]
        assert set(turns) <= {1, 3}
        assert turns.count(3) / 400 == pytest.approx(share, abs=0.1)


def test_only_asking_for_the_sum_in_the_first_turn_is_worth_something() -> None:
    task = Calculator(CalculatorConfig(digits=1, call_reward=0.25, shown_calls=1.0))
    right = task.instance("train", 0).answer[0]
    _, first, second = played(task, "train", 0, right, right)
    assert (first.reward, second.reward) == (0.25, 0.0)
    _, wrong, late = played(task, "train", 0, "[calculator 100+1]", right)
    assert (wrong.reward, late.reward) == (0.0, 0.0)


def test_no_sum_is_both_trained_on_and_evaluated() -> None:
    task = Calculator(CalculatorConfig(digits=1))
    train, held_out = ({task.instance(split, n).prompt for n in range(300)} for split in ("train", "eval"))
    assert train
    assert held_out
    assert not train & held_out


def test_any_task_can_have_tools() -> None:
    table = {"kind": "tools", "tools": ["calculator"], "style": "plain", "of": {"kind": "digit_sort", "digits": 4}}
    task: Any = load_task(table)
    instance = task.instance("train", 3)
    _, called_once, last = played(task, "train", 3, "[calculator 1+1]", instance.answer)
    assert called_once.observation == "2\n"
    assert called_once.components == {"calls": 1.0, "call_errors": 0.0}
    assert task.score(instance, last.answer).reward == 1.0
    with pytest.raises(ConfigError, match="cannot have more"):
        load_task(table | {"of": {"kind": "calculator"}})


def test_calls_after_slow_ones_are_told_so_and_fail_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(words: str) -> str:
        nonlocal now
        now += 0.05
        return words

    monkeypatch.setattr("async_rl.tasks.tools.time", SimpleNamespace(monotonic=lambda: now))
    environment = ToolEnvironment([tool_of(slow)], "plain", begin_within_s=0.01)
    step = asyncio.run(environment.step(Said("[slow a] [slow b] [slow c]", (), "stop")))
    refused = "error: not called, as the calls before it took too long\n"
    assert step.observation == "a\n" + 2 * refused
    assert step.components == {"calls": 3.0, "call_errors": 2.0}
    task: Any = load_task({"kind": "tools", "tools": ["calculator"], "of": {"kind": "digit_sort"}})
    assert task.environment()._begin_within_s == task.limits.step_timeout / 2


def test_a_chat_models_calls_are_answered_as_messages_of_the_tool() -> None:
    environment = ToolEnvironment([TOOLS["calculator"]], "chat")
    turn = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    step = asyncio.run(environment.step(Said(turn, (), "stop")))
    assert step.observation == [{"role": "tool", "name": "calculator", "content": "42"}]


def test_scoring_hears_of_the_inner_tasks_rewards_and_of_its_stream(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n')
    source = {"path": str(tmp_path / "rows.jsonl"), "prompt": "q", "answer": "a", "streaming": True, "size": 1}
    reward = {"kind": "http", "url": "http://127.0.0.1:9/score", "timeout": 30.0}
    of = {"kind": "dataset", "source": [source], "reward": [reward]}
    made: Any = load_task({"kind": "tools", "tools": ["calculator"], "of": of})
    inner: Any = load_task(of)
    assert (made.rewards.concurrency, made.rewards.seconds) == (inner.rewards.concurrency, inner.rewards.seconds)
    assert inner.rewards.seconds >= 30.0
    assert made.reads_forward


def test_what_is_no_function_is_no_tool() -> None:
    with pytest.raises(ConfigError, match="'math:pi' is no function"):
        load_tools(["math:pi"])

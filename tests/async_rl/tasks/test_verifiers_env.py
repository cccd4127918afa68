"""Environments of verifiers, run by the library itself, whose model is whoever answers our steps."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.schema import ConfigError
from async_rl.tasks.environment import EnvironmentTask, Said
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import TaskError
from async_rl.tasks.verifiers_endpoint import ModelCall, completion_of, messages_since

pytest.importorskip("verifiers")

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(6):
            yield SumTask(SumData(prompt=f"{n}+1=?", answer=str(n + 1)), self.config.task)

__all__ = ["Sums"]
"""
HARNESS = '''
import httpx
import verifiers.v1 as vf

class TwiceConfig(vf.HarnessConfig):
    forgets: bool = False

class Twice(vf.Harness[TwiceConfig]):
    """Asks, says "sure?", and asks again."""
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt if isinstance(prompt, str) else str(prompt)}]
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            for turn in range(2):
                response = await client.post(
                    f"{endpoint}/chat/completions", headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages},
                )
                response.raise_for_status()
                said = response.json()["choices"][0]["message"]
                messages = ([] if self.config.forgets else [*messages, said]) + [{"role": "user", "content": "sure?"}]
        return vf.ProgramResult(0, "", "")

__all__ = ["Twice"]
'''


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "sums_of_tests.py").write_text(TASKSET)
    (tmp_path / "twice_of_tests.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("sums_of_tests", "twice_of_tests"):
        sys.modules.pop(name, None)


def table(**harness: Any) -> dict[str, Any]:
    agent = {"harness": {"id": "twice_of_tests", **harness}, "runtime": {"type": "subprocess"}}
    return {
        "kind": "verifiers", "size": 4, "eval_size": 2, "env": {"taskset": {"id": "sums_of_tests"}, "agent": agent},
    }  # fmt: skip


def test_an_episode_is_played_turn_by_turn_and_rewarded_by_the_librarys_scores(modules: None) -> None:
    task: Any = load_task(table())
    assert isinstance(task, EnvironmentTask)

    async def attempt(number: int, *answers: str) -> tuple[Any, Any, Any]:
        environment = task.environment()
        first = await environment.reset(task.instance("train", number), 0)
        second = await environment.step(Said(answers[0], (1,), "stop"))
        last = await environment.step(Said(answers[1], (1,), "stop"))
        await environment.close()
        return first, second, last

    async def both() -> list[Any]:
        return await asyncio.gather(attempt(1, "2", "2"), attempt(3, "5", "4"), attempt(2, "3", "8"))

    (first, second, last), (other, _, right), (_, _, wrong) = asyncio.run(both())
    assert [message["content"] for message in first] == ["1+1=?"]
    assert [message["content"] for message in other] == ["3+1=?"], "attempts side by side do not mix"
    assert second.observation == [{"role": "user", "content": "sure?"}]
    assert not second.done
    assert (last.done, last.reward, last.components) == (True, 1.0, {"length": 1.0})
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_the_last_tasks_are_held_out(modules: None) -> None:
    task = load_task(table())
    assert (task.size("train"), task.size("eval")) == (4, 2)
    held_out = task.instance("eval", 0).messages
    assert held_out is not None
    assert held_out[0]["content"] == "4+1=?"


def test_a_harness_that_rewrites_its_conversation_is_a_failed_environment(modules: None) -> None:
    task: Any = load_task(table(forgets=True))

    async def attempt() -> None:
        environment = task.environment()
        try:
            await environment.reset(task.instance("train", 1), 0)
            await environment.step(Said("2", (1,), "stop"))
        finally:
            await environment.close()

    with pytest.raises(TaskError, match="did not go on with its conversation"):
        asyncio.run(attempt())


def test_what_cannot_be_loaded_is_said() -> None:
    with pytest.raises(ConfigError, match="which taskset"):
        load_task({"kind": "verifiers", "env": {}})
    missing: Any = load_task({"kind": "verifiers", "env": {"taskset": {"id": "no_such_taskset"}}})
    with pytest.raises(ConfigError, match="no_such_taskset"):
        missing.size("train")


def test_calls_of_tools_stand_apart_from_the_words() -> None:
    said = Said('hm <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', (1, 2), "stop")
    choice = completion_of(said, has_tools=True)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert completion_of(said, has_tools=False)["choices"][0]["message"]["content"] == said.text

    async def since() -> list[Any]:
        future: Any = asyncio.get_running_loop().create_future()
        user, turn = {"role": "user", "content": "?"}, {"role": "assistant", "content": None}
        result = {"role": "tool", "content": "2", "name": None}
        return messages_since(ModelCall([user], (), future), ModelCall([user, turn, result], (), future))

    assert asyncio.run(since()) == [{"role": "tool", "content": "2"}]

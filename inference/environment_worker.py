"""The process in which environments run: `python -P -m inference.environment_worker PARENT`.

It builds the task from the same [task] table as the node, answers `Ready`, then serves many attempts at a time in one
event loop: each `Begin`, `Step` and `End` gets one `Answer`, in any order. It imports nothing that is slow or optional,
besides what the task does.
"""

from __future__ import annotations

import asyncio
import operator
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import msgspec

from async_rl.run.pipes import die_with, take_over_pipes
from async_rl.tasks.environment import Environment, EnvironmentTask, Said, StepResult
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Split, instance_of
from inference.scoring_worker import Ready

# --- what crosses the pipe -------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, array_like=True):
    task: dict[str, Any]


class Begin(msgspec.Struct, array_like=True, tag=True):
    number: int
    split: Split
    instance: int
    seed: int


class Step(msgspec.Struct, array_like=True, tag=True):
    number: int
    text: str
    tokens: tuple[int, ...]
    finish: str


class End(msgspec.Struct, array_like=True, tag=True):
    number: int


Ask = Begin | Step | End


class Answer(msgspec.Struct, array_like=True):
    """With `error` not empty there is nothing else. The observation is text, ids or messages."""

    number: int
    observation: Any = ""
    reward: float = 0.0
    done: bool = False
    components: dict[str, float] = {}
    answer: str | None = None
    tools: list[dict[str, Any]] = []
    error: str = ""


# --- the worker ------------------------------------------------------------------------------------------------------


class Worlds:
    """The environments that are open here, by the number of their attempt."""

    def __init__(self, task: EnvironmentTask, timeout_s: float) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._open: dict[int, Environment] = {}

    async def answer(self, ask: Ask) -> Answer:
        """Whatever the environment raises becomes the answer's error."""
        try:
            match ask:
                case Begin():
                    return await self._begin(ask)
                case Step():
                    return await self._step(ask)
                case _:
                    environment = self._open.pop(ask.number, None)
                    if environment is not None:
                        await self._within(environment.close(), "closing it")
                    return Answer(ask.number)
        except (Exception, SystemExit) as error:
            return Answer(ask.number, error=f"the environment failed: {type(error).__name__}: {error}")

    async def _begin(self, ask: Begin) -> Answer:
        environment = self._task.environment()
        self._open[ask.number] = environment
        instance = instance_of(self._task, ask.split, ask.instance)  # type: ignore[arg-type]
        observation = await self._within(environment.reset(instance, ask.seed), "its reset")
        tools = [dict(tool) for tool in getattr(environment, "tools", ())]
        return Answer(ask.number, checked(observation), tools=tools)

    async def _step(self, ask: Step) -> Answer:
        said = Said(ask.text, ask.tokens, "stop" if ask.finish == "stop" else "length")
        result: StepResult = await self._within(self._open[ask.number].step(said), "a step")
        reward, components = float(result.reward), {str(name): float(of) for name, of in result.components.items()}
        observation = "" if result.done else checked(result.observation)
        return Answer(ask.number, observation, reward, bool(result.done), components, result.answer)

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            raise TimeoutError(f"{what} took longer than {self._timeout_s:g} s, or a wait in it") from None


def checked(observation: Any) -> Any:
    """The same as what crosses the pipe. Raises TypeError for what is no observation."""
    if isinstance(observation, str):
        return observation
    plain = [dict(each) if isinstance(each, Mapping) else each for each in observation]
    if all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in plain):
        return plain
    return [operator.index(each) for each in plain]


async def serve(worlds: Worlds, asks: Iterator[bytes], send: Callable[[msgspec.Struct], None]) -> None:
    """Until the input ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    decoder = msgspec.msgpack.Decoder(Ask)
    tasks: set[asyncio.Task[None]] = set()

    async def one(ask: Ask) -> None:
        send(await worlds.answer(ask))

    def take(body: bytes) -> None:
        task = loop.create_task(one(decoder.decode(body)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        for body in asks:
            loop.call_soon_threadsafe(take, body)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def main(parent: int) -> None:
    die_with(parent)
    asks, send = take_over_pipes()
    setup = msgspec.msgpack.decode(next(asks), type=Setup)
    try:
        task: Any = load_task(setup.task)
    except Exception as error:
        send(Ready(f"{type(error).__name__}: {error}"))
        return
    send(Ready(""))
    asyncio.run(serve(Worlds(task, task.limits.step_timeout), asks, send))


if __name__ == "__main__":
    main(int(sys.argv[1]))

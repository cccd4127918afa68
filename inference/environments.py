"""Attempts played in environments (async_rl.tasks.environment): the driver, and the workers in which the worlds are.

    reset ─> prompt ─> sample ─> step ─> the next prompt ─> sample ─> … until done, or a limit

Every prompt begins with the tokens of the one before and those that were sampled after it (async_rl.tasks.rendering);
where the model's template will not have that, a new segment begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.pipes import frame
from async_rl.tasks.environment import EnvironmentTask
from async_rl.tasks.rendering import Conversation, decode, following, opening
from inference.environment_worker import Answer, Ask, Begin, End, Setup, Step
from inference.episodes import NoRoom, Play
from inference.rollout import Outcome
from inference.scoring import MAX_FRAME_BYTES, START_TIMEOUT_S
from inference.scoring_worker import Ready

Tools = Sequence[Mapping[str, Any]]

LATE_S = 5.0  # beyond an environment's own time-out, in which its worker says so; then it is blocked, and is killed


class EnvironmentFailed(AsyncRLError):
    """An environment that raised, hung or died; the message says which."""


class EnvironmentDriver:
    """Plays attempts of `task`, whose worlds live in `workers` processes; made in any thread, used in one event
    loop."""

    def __init__(self, task: EnvironmentTask, table: Mapping[str, Any], tokenizer: Any, workers: int) -> None:
        self._limits = task.limits
        self._tools = task.tools
        self._tokenizer = tokenizer
        self._workers = [Worker(table, task.limits.step_timeout) for _ in range(workers)]
        self._numbers = itertools.count()

    async def play(self, play: Play) -> Outcome:
        number = next(self._numbers)
        worker = self._workers[number % len(self._workers)]
        components: Counter[str] = Counter()
        try:
            first, tools = await self._reset(play, worker, number)  # outside the limit: a worker may have to start
            async with asyncio.timeout(self._limits.time_limit):
                last = await self._turns(play, worker, number, first, tools, components)
        except (TimeoutError, NoRoom):
            last = None
        finally:
            await worker.forget(number)
        return Outcome(components=dict(components), cut=last is None, answer=last.answer if last else None)

    async def _reset(self, play: Play, worker: Worker, number: int) -> tuple[Conversation, Tools]:
        of = play.attempt
        began = await self._world(play, worker, Begin(number, of.split, of.instance, of.seed))
        tools = began.tools or self._tools
        return opening(began.observation, self._tokenizer, tools), tools

    async def _turns(
        self,
        play: Play,
        worker: Worker,
        number: int,
        conversation: Conversation,
        tools: Tools,
        components: Counter[str],
    ) -> Answer | None:
        """The world's last answer; None when the turns ran out before."""
        for turn in range(self._limits.max_turns):
            completion, place = await play.sample(conversation.prompt, conversation.reasons, self._left(play))
            tokens = completion.tokens.tolist()
            said = Step(number, decode(tokens, self._tokenizer), tuple(tokens), completion.finish)
            result = await self._world(play, worker, said)
            components.update(result.components)
            if result.reward:
                play.transcript.rewarded(place, result.reward)
            if result.done:
                return result
            if turn + 1 < self._limits.max_turns:
                conversation = following(
                    conversation, tokens, completion.finish, result.observation, self._tokenizer, tools
                )
        return None

    async def _world(self, play: Play, worker: Worker, ask: Ask) -> Answer:
        started = time.monotonic()
        try:
            return await worker.ask(ask)
        finally:
            play.world_s += time.monotonic() - started

    def _left(self, play: Play) -> int | None:
        most = self._limits.max_sampled_tokens
        return most - play.transcript.n_sampled if most else None

    async def close(self) -> None:
        for worker in self._workers:
            worker.kill()


class Worker:
    """A worker process, started when first needed and again when it died; what was open in it failed then."""

    def __init__(self, table: Mapping[str, Any], step_timeout_s: float) -> None:
        self._table = dict(table)
        self._timeout_s = step_timeout_s + LATE_S
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._open: set[int] = set()  # of the process that runs now

    async def ask(self, ask: Ask) -> Answer:
        """One question of an attempt at a time. Raises EnvironmentFailed."""
        if isinstance(ask, Begin):
            async with self._starting:
                await self._start()
            self._open.add(ask.number)
        elif ask.number not in self._open:
            raise EnvironmentFailed("its worker process ended, and the environment with it")
        assert self._process is not None
        assert self._process.stdin is not None
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[ask.number] = future
        self._process.stdin.write(frame(ask))
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await future
        except TimeoutError:
            self._end(f"an environment blocked its worker for more than {self._timeout_s:g} s: the worker was killed")
            raise EnvironmentFailed(f"it took longer than {self._timeout_s:g} s: its worker was killed") from None
        finally:
            self._waiting.pop(ask.number, None)
        if answer.error:
            raise EnvironmentFailed(answer.error)
        return answer

    async def forget(self, number: int) -> None:
        """Close the attempt's environment; how that goes is its own business."""
        if number in self._open:
            with contextlib.suppress(EnvironmentFailed):
                await self.ask(End(number))
            self._open.discard(number)

    async def _start(self) -> None:
        if self._process is not None:
            return
        # -P: a user's inference.py in the current directory must not be taken for ours. A session of its own: Ctrl-C is
        # the node's business, and a kill reaches what environments started.
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "inference.environment_worker", str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentFailed(f"a worker for environments cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(frame(Setup(self._table)))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = msgspec.msgpack.decode(await _body(self._process.stdout), type=Ready)
        except (TimeoutError, EOFError, msgspec.MsgspecError) as error:
            self._end("")
            raise EnvironmentFailed(f"a worker for environments did not start: {error!r}") from error
        except asyncio.CancelledError:  # the attempt that started it: nobody would read what it says
            self._end("")
            raise
        if ready.error:
            self._end("")
            raise EnvironmentFailed(f"a worker for environments cannot load the task: {ready.error}")
        self._reader = asyncio.get_running_loop().create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        decoder = msgspec.msgpack.Decoder(Answer)
        why = "its worker process ended"
        try:
            while True:
                answer = decoder.decode(await _body(process.stdout))
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer)
        except EOFError:
            pass
        except msgspec.MsgspecError as error:
            why = f"its worker sent what is no answer: {error}"
        if process is self._process:
            self._end(why)

    def _end(self, why: str) -> None:
        """Kill the process and all in its session; whoever waits for it hears why."""
        process, self._process = self._process, None
        self._open = set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EnvironmentFailed(why))
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        self._reader = None

    def kill(self) -> None:
        self._end("the node is leaving")


async def _body(stream: asyncio.StreamReader) -> bytes:
    """The next frame's. Raises EOFError where the stream ends."""
    try:
        size = int.from_bytes(await stream.readexactly(4), "little")
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return await stream.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise EOFError(str(error)) from error

"""The calls of a server that are under way: coroutines in a thread of their own, whose news go through one queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from inference.engine import EngineError
from inference.event_loop import EventLoop, TookTooLong
from inference.server import Call, EngineDied, Piece, Server, Signals

SIGNALS_S = 0.25  # between looks at the server
START_S, CALL_S, CLOSE_S = 900.0, 120.0, 20.0  # how long a server may take to start; to load, abort or score; to end

log = logging.getLogger("engine")

Key = tuple[int, int]
Result = TypeVar("Result")


class News(NamedTuple):
    """Of a call: a piece, or why there will be none."""

    key: Key
    call: str
    what: Piece | Exception


class ServerCalls:
    """Starts the server; raises EngineError when that fails. `died` says that it is gone, from when that was noticed:
    by a call, by a look at it four times a second, or because it samples nothing for `stall_timeout_s`."""

    def __init__(self, server: Server, stall_timeout_s: float) -> None:
        self._server, self._stall_timeout_s = server, stall_timeout_s
        self._queue: queue.SimpleQueue[News | EngineDied] = queue.SimpleQueue()
        self._ending: list[tuple[str | None, Future[None]]] = []  # adapter and abort of calls that are being ended
        self._last_news = time.monotonic()
        self._signals: Signals | None = None
        self.died: EngineDied | None = None
        self._loop = EventLoop(f"engine {server.capabilities.name}")
        try:
            self._loop.run(server.start(), START_S, "the start")
        except Exception:
            self.close()
            raise
        except BaseException:  # told to end: what it has started ends with this process
            self.close(within_s=1.0)
            raise
        self._loop.start(self._watch())

    @property
    def signals(self) -> Signals | None:
        """The server's latest, None before the first."""
        return self._signals

    def run(self, work: Coroutine[Any, Any, Result], what: str, within_s: float = CALL_S) -> Result:
        """Wait for something that the server does, and may do instead of sampling. Raises EngineError; EngineDied
        also when it takes too long: what the server has done of it nobody knows then."""
        try:
            result = self._loop.run(work, within_s, what)
            self._last_news = time.monotonic()
            return result
        except EngineDied as died:
            self.died = self.died or died
            raise
        except TookTooLong as late:
            raise self.ended(str(late)) from late

    def must(self, work: Coroutine[Any, Any, Result], what: str, within_s: float = CALL_S) -> Result:
        """The same of what no server in order refuses: one that does has another state than is known. Raises
        EngineDied."""
        try:
            return self.run(work, what, within_s)
        except EngineDied:
            raise
        except EngineError as error:
            raise self.ended(f"{what}: {error}") from error

    def ended(self, why: str) -> EngineDied:
        """From now on it counts as dead; to be raised."""
        self.died = self.died or EngineDied(why)
        return self.died

    def begin(self, key: Key, call: Call) -> None:
        self._loop.start(self._pump(key, call))

    def end(self, call: str, adapter: str | None) -> None:
        """Begin to abort it; its news are to be listened to no more."""
        if self.died is None:
            self._ending = [(used, ended) for used, ended in self._ending if not ended.done()]
            self._ending.append((adapter, self._loop.start(self._server.abort(call))))

    def wait_for_ending(self, adapter: str | None = None) -> None:
        """Until no call of this adapter (None: of any) is still being ended. Raises EngineDied when one does not end:
        what it uses is not to be taken from it."""
        deadline = time.monotonic() + CALL_S
        for used, ended in self._ending:
            if adapter is None or used == adapter:
                with contextlib.suppress(Exception):  # if that failed, so will what comes next
                    ended.result(max(0.0, deadline - time.monotonic()))
                if not ended.done():
                    raise self.ended(f"{self._server.capabilities.name} did not end a request within {CALL_S:g} s")

    def news(self, wait_s: float = 0.0) -> Iterator[News]:
        """Everything that has come; waits at most so long for the first."""
        try:
            news = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            while True:
                self._last_news = time.monotonic()
                died = news if isinstance(news, EngineDied) else news.what
                if isinstance(died, EngineDied):
                    self.died = self.died or died
                else:
                    assert isinstance(news, News)
                    yield news
                news = self._queue.get_nowait()
        except queue.Empty:
            return

    def check_stall(self, running: int) -> None:
        """With nothing under way, nothing is expected."""
        if not running:
            self._last_news = time.monotonic()
        elif self.died is None and time.monotonic() - self._last_news > self._stall_timeout_s:
            self.ended(
                f"{self._server.capabilities.name} has {running} requests and sampled nothing for "
                f"{self._stall_timeout_s:g} s ([inference] engine_timeout): it counts as dead"
            )

    def close(self, within_s: float = CLOSE_S) -> None:
        try:
            self._loop.run(self._server.close(), within_s, "the end")
        except Exception as error:  # it is the end in any case
            log.warning("%s: %s", self._server.capabilities.name, error)
        self._loop.close()

    async def _pump(self, key: Key, call: Call) -> None:
        finished = False
        try:
            async for piece in self._server.generate(call):
                finished = piece.finish is not None
                self._queue.put(News(key, call.name, piece))
            if not finished:
                raise EngineError(f"{self._server.capabilities.name} ended a request without saying why")
        except Exception as error:
            self._queue.put(News(key, call.name, error))

    async def _watch(self) -> None:
        """How the server is doing, and whether it lives."""
        while True:
            await asyncio.sleep(SIGNALS_S)
            try:
                await self._server.check()
                self._signals = await self._server.signals()
            except EngineDied as died:
                self._queue.put(died)
                return
            except EngineError:
                continue  # it is busy: what it says is old, and a look at it comes again
            except Exception:  # an answer that nobody foresaw must not be the last that is looked at
                log.exception("a look at %s", self._server.capabilities.name)

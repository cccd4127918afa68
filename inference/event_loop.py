"""An event loop in a thread of its own, for engines that the node's thread calls and that are asynchronous inside."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from inference.engine import EngineError

Result = TypeVar("Result")

END_S = 5.0  # for the thread, once it was told to stop


class TookTooLong(EngineError):
    """It was given up, and may have been done all the same."""


class EventLoop:
    """Runs until `close`. Its thread is a daemon: a coroutine that hangs keeps no process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._name = name
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Begin, and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result], within_s: float, what: str) -> Result:
        """Wait for the result. Raises TookTooLong, and gives up the work, when it is not there in time; else what the
        work raises."""
        future = self.start(work)
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise TookTooLong(f"{self._name}: {what} took more than {within_s:g} s and was given up") from None

    def close(self) -> None:
        """Cancels what still runs."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.1, self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    own = asyncio.current_task()
    for task in asyncio.all_tasks():
        if task is not own:
            task.cancel()

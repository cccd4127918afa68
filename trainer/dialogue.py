"""What the trainer asks the buffer, and how it waits for the answer: in slices, so that it hears of a stop, and across
a restart of the buffer, which has its journal but not the answers that were under way.

Every question may be asked twice: the rules answer the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.run.watchdog import Watchdog
from async_rl.wire.link import Client, LinkTimeout, Received
from async_rl.wire.messages import Message, StatusRequest
from async_rl.wire.seen import Seen

log = logging.getLogger("learner")

SLICE_S = 0.5  # how often a long wait looks whether the trainer is to stop
STATUS_EVERY_S = 1.0  # how often the state of the pools is asked for, to be recorded


class Interrupted(AsyncRLError):
    """The trainer was asked to stop; what leaves `Learner.learn` has checkpointed."""


def anything(message: Any) -> bool:
    return True


class Dialogue:
    """`introduction` is what a buffer that does not know this trainer (yet, or any more) has to hear first; `passing`
    hears every message that comes while the trainer waits, whatever it waits for; `seen` says what of the buffer's
    history it has heard of."""

    def __init__(
        self,
        buffer: Client,
        introduction: Callable[[], Iterable[Message]],
        passing: Callable[[Message], None],
        seen: Callable[[], Seen],
        stopping: threading.Event,
        watchdog: Watchdog,
    ) -> None:
        self._buffer = buffer
        self._introduction = introduction
        self._passing = passing
        self._seen = seen
        self._stopping = stopping
        self._watchdog = watchdog
        self._sessions = buffer.sessions
        self._status_asked = 0.0

    def introduce(self) -> None:
        for message in self._introduction():
            self._buffer.send(message)

    def ask(
        self, request: Message, kind: type[Any], timeout_s: float, awaiting: str, *, interruptible: bool = False,
        wanted: Callable[[Any], bool] = anything,
    ) -> Received:  # fmt: skip
        """Send a request and wait for the answer, as `receive` does; a buffer that was started again is asked again."""
        self._buffer.send(request)
        return self.receive(kind, timeout_s, awaiting, interruptible=interruptible, wanted=wanted, again=request)

    def receive(
        self, kind: type[Any], timeout_s: float, awaiting: str, *, interruptible: bool = False,
        wanted: Callable[[Any], bool] = anything, again: Message | None = None,
    ) -> Received:  # fmt: skip
        """The next message of a kind that is wanted. Raises LinkTimeout, Interrupted (where allowed), LinkError when
        the buffer is lost for good, and what `passing` raises."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._watchdog.beat(f"waits for {awaiting} from the buffer")
            if interruptible and self._stopping.is_set():
                raise Interrupted(f"told to stop while it waited for {awaiting}")
            self._notice_a_new_buffer(again)
            self._ask_status_if_due()
            left = max(0.0, deadline - time.monotonic())
            try:
                received = self._buffer.receive(min(SLICE_S, left), awaiting)
            except LinkTimeout as timeout:
                if left > SLICE_S:
                    continue
                raise LinkTimeout(f"waited {timeout_s:.0f} s for {awaiting} from the buffer") from timeout
            self._passing(received.message)
            if isinstance(received.message, kind) and wanted(received.message):
                return received

    def _notice_a_new_buffer(self, again: Message | None) -> None:
        if self._buffer.sessions > self._sessions:
            self._sessions = self._buffer.sessions
            log.warning("the buffer was started again, or has forgotten this trainer: introduced again")
            self.introduce()
            if again is not None:
                self._buffer.send(again)

    def _ask_status_if_due(self) -> None:
        """What the pools are doing is recorded by the trainer, where the metrics are: nodes may be on any machine."""
        now = time.monotonic()
        if now - self._status_asked >= STATUS_EVERY_S:
            self._status_asked = now
            self._buffer.send(StatusRequest(self._seen()))

"""What the trainer asks the buffer, and how it waits for the answer: in slices, so that it hears of a stop, and across
a restart of the buffer, which has its journal but not the answers that were under way.

Every question may be asked twice: the rules answer the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.run.shard_links import BufferLink, clients_of, sender_of
from async_rl.run.watchdog import Watchdog
from async_rl.shards import shard_name, whole_status
from async_rl.wire.link import LinkTimeout, Received
from async_rl.wire.messages import Message, Status, StatusRequest
from async_rl.wire.seen import NOTHING_SEEN, Seen

log = logging.getLogger("learner")

SLICE_S = 0.5  # how often a long wait looks whether the trainer is to stop
STATUS_EVERY_S = 1.0  # how often the state of the pools is asked for, to be recorded


class Interrupted(AsyncRLError):
    """The trainer was asked to stop; what leaves `Learner.learn` has checkpointed."""


def anything(message: Any) -> bool:
    return True


class Dialogue:
    """`introduction` is what a shard of the buffer (the only one is 0) that does not know this trainer (yet, or any
    more) has to hear first; `passing` hears every message that comes while the trainer waits, whatever it waits for;
    of the shards' accounts the whole one. `seen` says what of the first one's history it has heard of."""

    def __init__(
        self,
        buffer: BufferLink,
        introduction: Callable[[int], Iterable[Message]],
        passing: Callable[[Message], None],
        seen: Callable[[], Seen],
        stopping: threading.Event,
        watchdog: Watchdog,
    ) -> None:
        self._buffer = buffer
        self._clients = clients_of(buffer)
        self._introduction = introduction
        self._passing = passing
        self._seen = seen
        self._stopping = stopping
        self._watchdog = watchdog
        self._sessions = [client.sessions for client in self._clients]
        self._statuses: dict[int, Status] = {}
        self._heard_of: dict[int, Seen] = {}
        self._status_asked = 0.0

    @property
    def shards(self) -> int:
        return len(self._clients)

    def introduce(self) -> None:
        for shard in range(self.shards):
            self._introduce_to(shard)

    def _introduce_to(self, shard: int) -> None:
        for message in self._introduction(shard):
            self._clients[shard].send(message)

    def ask(
        self, request: Message | Sequence[Message], kind: type[Any], timeout_s: float, awaiting: str, *,
        interruptible: bool = False, wanted: Callable[[Any], bool] = anything,
        between: Callable[[], None] | None = None,
    ) -> list[Received]:  # fmt: skip
        """Ask every shard, the same or each its own, and wait for all answers, in the order of the shards; one that was
        started again is asked again. `between` is called when the first has taken its own in and the others have
        nothing yet. As `receive` otherwise."""
        requests = [request] * self.shards if isinstance(request, Message) else list(request)
        for shard, (client, each) in enumerate(zip(self._clients, requests, strict=True)):
            if shard == 1 and between is not None:
                with self._watchdog.expect("waits for the first shard to take its question in", timeout_s):
                    self._clients[0].flush(timeout_s)
                between()
            client.send(each)
        again = dict(enumerate(requests))
        return self._wait(
            kind, timeout_s, awaiting, interruptible, wanted, again, lambda got: len(got) == self.shards
        )

    def receive(
        self, kind: type[Any], timeout_s: float, awaiting: str, *, interruptible: bool = False,
        wanted: Callable[[Any], bool] = anything,
    ) -> Received:  # fmt: skip
        """The next message of a kind that is wanted, from any shard. Raises LinkTimeout, Interrupted (where allowed),
        LinkError when a shard is lost for good, and what `passing` raises."""
        return self._wait(kind, timeout_s, awaiting, interruptible, wanted, {}, lambda got: bool(got))[0]

    def _wait(
        self, kind: type[Any], timeout_s: float, awaiting: str, interruptible: bool, wanted: Callable[[Any], bool],
        again: dict[int, Message], enough: Callable[[dict[int, Received]], bool],
    ) -> list[Received]:  # fmt: skip
        deadline = time.monotonic() + timeout_s
        got: dict[int, Received] = {}
        while not enough(got):
            self._watchdog.beat(f"waits for {awaiting} from the buffer")
            if interruptible and self._stopping.is_set():
                raise Interrupted(f"told to stop while it waited for {awaiting}")
            self._notice_new_shards({shard: each for shard, each in again.items() if shard not in got})
            self._ask_status_if_due()
            left = max(0.0, deadline - time.monotonic())
            try:
                received = self._buffer.receive(min(SLICE_S, left), awaiting)
            except LinkTimeout as timeout:
                if left > SLICE_S:
                    continue
                raise LinkTimeout(f"waited {timeout_s:.0f} s for {awaiting} from {self._whom(got)}") from timeout
            shard = sender_of(self._buffer, received)
            self._hear(shard, received.message)
            if isinstance(received.message, kind) and wanted(received.message):
                got[shard] = received
        return [got[shard] for shard in sorted(got)]

    def _whom(self, got: Collection[int]) -> str:
        missing = [shard_name(shard) for shard in range(self.shards) if shard not in got]
        return "the buffer" if self.shards == 1 else ", ".join(missing)

    def _hear(self, shard: int, message: Message) -> None:
        if not isinstance(message, Status):
            self._passing(message)
            return
        self._statuses[shard] = message
        self._heard_of[shard] = Seen(message.life, message.pushes, message.mismatch_count)
        if len(self._statuses) == self.shards:
            self._passing(whole_status([self._statuses[each] for each in range(self.shards)]))
            self._statuses = {}

    def _notice_new_shards(self, again: dict[int, Message]) -> None:
        for shard, client in enumerate(self._clients):
            if client.sessions > self._sessions[shard]:
                self._sessions[shard] = client.sessions
                log.warning("the %s was started again, or has forgotten this trainer: introduced again", client.peer)
                self._introduce_to(shard)
                if shard in again:
                    client.send(again[shard])

    def _ask_status_if_due(self) -> None:
        """What the pools are doing is recorded by the trainer, where the metrics are: nodes may be on any machine."""
        now = time.monotonic()
        if now - self._status_asked >= STATUS_EVERY_S:
            self._status_asked = now
            for shard, client in enumerate(self._clients):
                client.send(StatusRequest(self._seen() if shard == 0 else self._heard_of.get(shard, NOTHING_SEEN)))

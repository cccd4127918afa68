"""Links to a buffer of several shards, with the face of a link to one: what is sent goes to all of them, or to one that
is named; what is received comes from any, and says from which (`shard_of`)."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any

from async_rl.shards import shard_name
from async_rl.wire.link import Client, LinkError, LinkTimeout, Received
from async_rl.wire.messages import Message


class ShardLinks:
    """`clients` are in the order of the shards, and deliver to `inbox`."""

    def __init__(self, clients: Sequence[Client], inbox: queue.SimpleQueue[Any]) -> None:
        self.clients = tuple(clients)
        self._inbox = inbox
        self._numbers = {shard_name(number): number for number in range(len(clients))}

    @property
    def sessions(self) -> int:
        """It rises when any of the shards is a new one."""
        return sum(client.sessions for client in self.clients)

    def shard_of(self, received: Received) -> int:
        return self._numbers[received.peer]

    def send(self, message: Message, blobs: Sequence[bytes | memoryview] = (), timeout_s: float = 30.0) -> None:
        """To every shard."""
        for client in self.clients:
            client.send(message, blobs, timeout_s)

    def flush(self, timeout_s: float) -> None:
        """See Client.flush: all of them within the time."""
        deadline = time.monotonic() + timeout_s
        for client in self.clients:
            client.flush(max(0.0, deadline - time.monotonic()))

    def receive(self, timeout_s: float, awaiting: str) -> Received:
        """The next message of any shard. Raises LinkTimeout, or the error that ended a link."""
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            raise LinkTimeout(f"waited {timeout_s:g} s for {awaiting} from the buffer's shards") from None
        if isinstance(item, LinkError):
            raise item
        assert isinstance(item, Received)
        return item

    def close(self, timeout_s: float = 2.0) -> None:
        deadline = time.monotonic() + timeout_s
        for client in self.clients:
            client.close(max(0.1, deadline - time.monotonic()))


BufferLink = Client | ShardLinks


def clients_of(buffer: BufferLink) -> tuple[Client, ...]:
    """One for each shard."""
    return buffer.clients if isinstance(buffer, ShardLinks) else (buffer,)


def sender_of(buffer: BufferLink, received: Received) -> int:
    """The number of the shard that sent it."""
    return buffer.shard_of(received) if isinstance(buffer, ShardLinks) else 0

"""A link whose messages are lost, doubled, overtaken or damaged on the way, with seeded probabilities.

`make_lossy(client, ...)` puts a wrapper around the client's ZeroMQ socket, before it connects. Both directions pass
there, so the other side is the real thing, unchanged; what the wrapper does to a message is what a broken network
below ZeroMQ could at most do."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any, NamedTuple

import zmq

from async_rl.wire.link import Client


class Rates(NamedTuple):
    """Probabilities, each for one message, in both directions; only what is sent is damaged, too: it loses the end of
    its first frame."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    damage: float = 0.0


class LossySocket:
    """What wire/client.py uses of a socket. It is called under the client's lock alone."""

    def __init__(self, socket: zmq.Socket[bytes], rates: Rates, seed: int) -> None:
        self._socket = socket
        self._rates = rates
        self._random = random.Random(seed)
        self._parts: list[Any] = []
        self._held_out: list[Any] | None = None
        self._held_in: list[Any] | None = None
        self._waiting: deque[list[Any]] = deque()  # messages to be read, first frame first
        self.done: Counter[str] = Counter()

    def send(self, part: Any, flags: int = 0, copy: bool = True) -> None:
        if not self._parts and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            raise zmq.Again
        self._parts.append(bytes(part))
        if flags & zmq.SNDMORE:
            return
        message, self._parts = self._parts, []
        if self._random.random() < self._rates.damage:
            self.done["damage"] += 1
            message[0] = message[0][: self._random.randrange(len(message[0]))]
        messages, self._held_out = self._fates(message, self._held_out)
        for parts in messages:
            self._socket.send_multipart(parts, zmq.NOBLOCK)

    def recv(self, flags: int = 0, copy: bool = True) -> zmq.Frame:
        while not self._waiting or not self._waiting[0]:
            if self._waiting:
                self._waiting.popleft()
                continue
            message = [frame.bytes for frame in self._socket.recv_multipart(flags, copy=False)]
            messages, self._held_in = self._fates(message, self._held_in)
            self._waiting.extend(messages)
        parts = self._waiting[0]
        frame = zmq.Frame(parts.pop(0))
        frame.more = bool(parts)
        return frame

    def getsockopt(self, option: int) -> Any:
        value = self._socket.getsockopt(option)
        if option == zmq.EVENTS and any(self._waiting):
            value |= zmq.POLLIN
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _fates(self, message: list[Any], held: list[Any] | None) -> tuple[list[list[Any]], list[Any] | None]:
        """What passes now, and what is held back until after the next message."""
        draw, rates = self._random.random, self._rates
        if draw() < rates.drop:
            self.done["drop"] += 1
            return [] if held is None else [held], None
        if held is None and draw() < rates.reorder:
            self.done["reorder"] += 1
            return [], message
        passing = [message]
        if draw() < rates.duplicate:
            self.done["duplicate"] += 1
            passing.append(list(message))
        if held is not None:
            passing.append(held)
        return [list(parts) for parts in passing], None


def make_lossy(client: Client, rates: Rates, seed: int) -> LossySocket:
    lossy = LossySocket(client._socket, rates, seed)
    client._socket = lossy  # type: ignore[assignment]
    return lossy

"""What a dialling end sits on: its socket, and how its thread is woken."""

from __future__ import annotations

import contextlib
import select
import socket as sockets

import zmq

from async_rl.wire.frames import set_common_options
from async_rl.wire.keys import DialKeys

RECONNECT_FIRST_MS = 20
RECONNECT_LAST_MS = 1000


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: DialKeys | None) -> zmq.Socket[bytes]:
    """A socket to dial `endpoint` with; it is not dialled yet."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    set_common_options(socket, endpoint)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    # Not zmq.IMMEDIATE: with it libzmq drops, together with a closed connection, what arrived on it and was not
    # read yet, and that may be the server's goodbye (5 of 60 closes).
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LAST_MS)
    return socket


def watching(*descriptors: int) -> select.poll:
    """Of one thread alone: two cannot wait with one."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return poller


class Bell:
    """What a thread that waits for descriptors is woken with."""

    def __init__(self) -> None:
        self._heard, self._rung = sockets.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody to wake
            self._rung.send(b"\0")

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard.recv(4096)

    def close(self) -> None:
        self._heard.close()
        self._rung.close()

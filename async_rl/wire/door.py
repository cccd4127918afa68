"""The door of a service: who may come in. Keys are looked at while a connection is made, the rest at Hello.

With keys, libzmq itself refuses a connection that does not speak CURVE or does not know this service's public key, and
asks the handler here (ZAP) about each other one; so not a byte of a stranger is read. Every refusal is counted, under
one of a few fixed names:

    no_handshake     not ZeroMQ, or not CURVE, or sealed for another service (counted now and then, not at once)
    unknown_key      its public key is not in the file `allowed`
    wrong_run, wrong_token, wrong_role_key, wrong_name, name_taken      see `Door.refusal`
"""

from __future__ import annotations

import hmac
from collections import Counter
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from async_rl.wire.frames import Hello
from async_rl.wire.keys import DoorKeys
from async_rl.wire.messages import Envelope

MAX_NAME = 200
SHOWN_CHARACTERS = 80  # of what a stranger sent, in what is said about it
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
FAILURES_ENDPOINT = "inproc://failed-handshakes"
READ_AT_ONCE = 10_000  # events of failed handshakes, so that a flood of them cannot keep the service from its work


class Door:
    """Made before `socket` is bound. `counters` is the server's."""

    def __init__(
        self,
        context: zmq.Context[Any],
        socket: zmq.Socket[bytes],
        counters: Counter[str],
        *,
        run: str,
        token: str,
        keys: DoorKeys | None,
    ) -> None:
        self._run = run
        self._token = token.encode()
        self._keys = keys
        self._counters = counters
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.configure_curve_callback(credentials_provider=self)
            self._authenticator.start()
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._watched = socket
        socket.monitor(FAILURES_ENDPOINT, FAILED_HANDSHAKES)
        self._failures: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # With a bound, libzmq's own thread would wait for room here, and nobody be served: a flood would do it (tried).
        self._failures.setsockopt(zmq.RCVHWM, 0)
        self._failures.connect(FAILURES_ENDPOINT)

    def callback(self, _domain: str, key: bytes) -> bool:
        """ZAP's question, in the authenticator's thread: may a connection with this public key come in?"""
        assert self._keys is not None
        known = bool(self._keys.roles(key.decode()))
        if not known:
            self._counters["unknown_key"] += 1
        return known

    def count_failures(self) -> None:
        """Connections that never got as far as a message since the last look."""
        for _ in range(READ_AT_ONCE):
            try:
                head, _endpoint = self._failures.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if int.from_bytes(head[:2], "little") != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # that one is an unknown key
                self._counters["no_handshake"] += 1

    def refusal(self, server: str, envelope: Envelope, hello: Hello, key: str) -> tuple[str, str] | None:
        """Why this Hello is not welcome: the counter's name, and the sentence its sender will read. `key` is the public
        key that the connection was authenticated with, empty without keys; `server` says who refuses, and where."""
        name = shown(hello.name)
        if envelope.run != self._run:
            return "wrong_run", (
                f"{server} serves run {self._run!r}, {name} belongs to run {shown(envelope.run)}: use the endpoint of "
                "its own run"
            )
        if not hmac.compare_digest(hello.token.encode(), self._token):
            return "wrong_token", (
                f"{server} does not accept the token of {name}: both must read the token file of the same run"
            )
        if self._keys is not None and hello.role not in self._keys.roles(key):
            listed = ", ".join(sorted(self._keys.roles(key))) or "no role"
            return "wrong_role_key", (
                f"{server} does not accept {name} as a {hello.role}: its key is listed for {listed}, so use the "
                f"{hello.role}'s, or add the line to the file `allowed` of the services' keys"
            )
        if not 0 < len(hello.name) <= MAX_NAME or not hello.name.isprintable():
            return "wrong_name", f"a client's name has 1 to {MAX_NAME} printable characters, this one is {name}"
        return None

    def close(self) -> None:
        """Before its socket is closed."""
        self._watched.disable_monitor()
        self._failures.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()


def key_of(frame: memoryview) -> str:
    """The public key (Z85) that the connection of a received frame was authenticated with; empty without keys. A view
    of a frame (frames.receive_frames) leads back to it, and libzmq keeps what the handshake found with each."""
    try:
        return str(frame.obj.get("User-Id"))  # type: ignore[attr-defined]
    except (zmq.ZMQError, AttributeError):
        return ""


def shown(text: str) -> str:
    """What a peer said, fit for a log line: quoted, short, and nothing that a terminal would obey."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")

"""Between two cells: messages of JSON."""

from __future__ import annotations

import json
import socket
from typing import Any

MOST_ANSWER = 8 << 20  # bytes of one message


class Channel:
    """The length as four bytes, little-endian, then the text. What arrives is what a program sent, whatever that is."""

    def __init__(self, file: int) -> None:
        self._socket = socket.socket(fileno=file)

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        self._socket.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self) -> Any:
        """Raises EOFError at its end, ValueError for what is no message."""
        size = int.from_bytes(self._exactly(4), "little")
        if size > MOST_ANSWER:
            raise ValueError(f"an answer of {size} bytes")
        try:
            return json.loads(self._exactly(size))
        except RecursionError:
            raise ValueError("an answer nested too deeply") from None

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(min(count - len(data), 1 << 16))
            except OSError:
                part = b""
            if not part:
                raise EOFError
            data += part
        return bytes(data)

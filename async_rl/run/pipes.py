"""Messages between a process and one that it started, over the child's standard input and output.

A frame is a length, four bytes little-endian, and a msgspec struct in msgpack. The child moves both ends away from the
standard streams before it imports anything else, so nothing that prints can get between the frames.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from async_rl.errors import AsyncRLError

READ_BYTES = 1 << 16
END_S = 5.0  # for a child whose input has ended
PR_SET_PDEATHSIG = 1  # linux/prctl.h

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def take_over_pipes() -> tuple[Iterator[bytes], Callable[[msgspec.Struct], None]]:
    """The child's side: the bodies that come in, until the input ends, and the function that sends one. What prints
    afterwards writes to stderr, what reads finds the end of input."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def frames() -> Iterator[bytes]:
        while len(head := incoming.read(4)) == 4:
            yield incoming.read(int.from_bytes(head, "little"))

    def answer(message: msgspec.Struct) -> None:
        outgoing.write(frame(message))
        outgoing.flush()

    return frames(), answer


def die_with(parent: int) -> None:
    """End when the process that started this one does, even in the middle of something (Linux; elsewhere at the next
    read). It is the thread that counts: a process dies with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            sys.exit(1)


class Child:
    """A process that answers each question with one frame: `python -P -m module arguments`, its stderr this one's.

    Not for children that send unasked: one question is under way at a time. A context manager that leaves no process
    behind. A child that follows its parent (async_rl.run.process) follows the thread that made it."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0,
        )  # fmt: skip

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: msgspec.Struct, kind: type[T], timeout_s: float) -> T:
        """Raises AsyncRLError when the child ends, or has not answered in time (and then ends it)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame(question))
        except BrokenPipeError:
            raise AsyncRLError(self._ending()) from None
        deadline = time.monotonic() + timeout_s
        size = int.from_bytes(self._read(4, deadline), "little")
        return msgspec.msgpack.decode(self._read(size, deadline), type=kind)

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < count:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self._process.kill()
                raise AsyncRLError(f"{self._module} (process {self._process.pid}) has not answered in time: ended")
            data = os.read(pipe, min(READ_BYTES, count - len(parts)))
            if not data:
                raise AsyncRLError(self._ending())
            parts += data
        return bytes(parts)

    def _ending(self) -> str:
        try:
            code: Any = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = "unknown, it still runs"
        return f"{self._module} (process {self._process.pid}) ended before it answered, exit code {code}: see above"

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Its input ends, and soon it does."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)

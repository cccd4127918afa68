"""One cell as seen from outside: what it prints, and how it ends, in one word."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.sandbox.inside import EXIT_NAMES
from async_rl.sandbox.limits import Limits

READ_BYTES = 1 << 16


class SandboxError(AsyncRLError):
    """A machine that cannot isolate programs, or a sandbox that broke: nothing that a program is to blame for."""


class Cell:
    """One program in its cell, as seen from outside."""

    def __init__(self, word: socket.socket, outputs: list[int], limits: Limits) -> None:
        self.word = word
        self.limits = limits
        self.printed = {file: bytearray() for file in outputs}
        self.flooded = False
        self.end: dict[str, Any] | None = None

    def read(self, file: int) -> bool:
        """Take in what it has printed; False when it is closed, or nothing is there."""
        try:
            data = os.read(file, READ_BYTES)
        except BlockingIOError:
            return False
        room = self.limits.output_bytes - len(self.printed[file])
        self.printed[file] += data[:room]
        if len(data) > room:
            self.flooded = True
            self.stop()
        return bool(data)

    def hear(self) -> None:
        """The keeper's last word has come. Raises SandboxError when there is none."""
        data = self.word.recv(READ_BYTES)
        if not data:
            raise SandboxError("the keeper of a cell ended without a word: was it killed for want of memory?")
        self.end = json.loads(data)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.word.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.word.close()
        for file in self.printed:
            os.close(file)

    def reason(self) -> str:
        """Why it ended. Raises SandboxError when that was no doing of its own."""
        end = self.end
        assert end is not None
        if "missing" in end:
            raise SandboxError(refusal(end["missing"]))
        if self.flooded:
            return "output"
        reason = reason_of(end["why"], end["code"], end["cpu"], self.limits)
        if reason == "killed":
            raise SandboxError(
                "a program was killed from outside, as the kernel does when memory runs out: let fewer or smaller ones "
                "run at once (memory_mb, processes, inference.reward_workers)"
            )
        return reason

    def texts(self) -> list[str]:
        return [bytes(data).decode(errors="replace") for data in self.printed.values()]


# Against its limit the kernel counts a whole tick for whoever runs when one comes: beside busy processes, programs were
# killed for their processor time when they had had 0.6 of it.
TICKED = 0.5


def reason_of(why: str, code: int, cpu_s: float, limits: Limits) -> str:
    """One word for the end of a cell: by its keeper's hand (`why`), by a signal (a negative code), or by itself. One
    that was told to end may have been about to, by itself."""
    if why == "timeout":
        return why
    if code == -signal.SIGSYS:
        return "forbidden"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= TICKED * limits.killed_at_cpu_s):
        return "cpu"
    if code == -signal.SIGKILL:
        return "told" if why == "told" else "killed"
    if code < 0:
        return "disk" if code == -signal.SIGXFSZ else "signal"
    return "ok" if code == 0 else EXIT_NAMES.get(code, "error")


def refusal(missing: str) -> str:
    return (
        f"this machine cannot isolate programs, so code rewards and the Python tool are refused: {missing}. Needed are "
        "Linux 5.14 or newer on x86-64 or arm64, with user namespaces and seccomp: allow them (sysctl "
        "user.max_user_namespaces and, on Ubuntu, kernel.apparmor_restrict_unprivileged_userns; a container needs "
        "them from its runtime), or score elsewhere. See docs/sandbox.md"
    )

"""The program of an agent, run once: in a folder and a session of its own, for so long, with what it says kept short.

Its standard input is the instance as JSON, which also lies in its folder. Whatever it has started and is still there
when it has ended, or its time is up, is killed, and the folder is removed. inference/agent_guard.py does the killing,
also where the node itself was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.errors import AsyncRLError
from inference import agent_guard

KEPT_BYTES = 1 << 16  # of what it writes to each stream: the end
READ_BYTES = 1 << 16
GUARD_S = 5.0  # for the guard to end all there is, and itself
DRAIN_S = 1.0  # for what was written before the kill to be read
GUARD = (sys.executable, "-I", "-S", agent_guard.__file__)


class AgentFailed(AsyncRLError):
    """The agent's program failed: the attempt is tried again, and never worth 0."""


class Ran(NamedTuple):
    """How it ended: its exit code (128 and more: by a signal), None when it had to be ended; and the end of what it
    wrote."""

    code: int | None
    stdout: str
    stderr: str


async def run_program(
    command: Sequence[str],
    folder: Path,
    given: bytes,
    environment: Mapping[str, str],
    limit_s: float,
    trouble: asyncio.Future[None],
) -> Ran:
    """Run it until it ends, `limit_s` seconds have passed, or there is `trouble`. `folder` is the caller's; `given` is
    what it reads. Raises AgentFailed when it cannot be started."""
    input_file = folder / "instance.json"
    input_file.write_bytes(given)
    alive, held = os.pipe()
    # Pipes of our own: asyncio's say that a process has ended only when all that hold them have.
    pipes = [os.pipe() for _ in range(2)]
    kept = bytearray(), bytearray()
    readers = [asyncio.create_task(_keep_end(read, into)) for (read, _), into in zip(pipes, kept, strict=True)]
    try:
        with input_file.open("rb") as stdin:
            process = await asyncio.create_subprocess_exec(
                *GUARD, str(alive), *command, cwd=folder, env=dict(environment), stdin=stdin, stdout=pipes[0][1],
                stderr=pipes[1][1], pass_fds=(alive,), start_new_session=True,
            )  # fmt: skip
    except (OSError, ValueError) as error:
        os.close(held)
        raise AgentFailed(f"the agent cannot be started: {error}") from error
    finally:
        for each in (alive, pipes[0][1], pipes[1][1]):
            os.close(each)
    ended = asyncio.create_task(process.wait())
    either: set[asyncio.Future[Any]] = {ended, trouble}
    try:
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        code = process.returncode if ended.done() else None
    finally:
        os.close(held)  # which the guard takes for our end
        await asyncio.wait({ended}, timeout=GUARD_S)
        # Its group outlives it where something in it does: a group is not given to others while it has members.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _see_it_end(ended, readers)
    return Ran(code, *(bytes(each).decode(errors="replace") for each in kept))


async def _see_it_end(ended: asyncio.Task[int], readers: Sequence[asyncio.Task[None]]) -> None:
    """A process that got away may hold the pipes open: nobody waits for that one."""
    await asyncio.wait({ended, *readers}, timeout=DRAIN_S)
    for task in (ended, *readers):
        task.cancel()


async def _keep_end(pipe: int, into: bytearray) -> None:
    """Read to the end, so that a program that prints much is not held up, and keep the last KEPT_BYTES."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while data := await stream.read(READ_BYTES):
            into += data
            del into[:-KEPT_BYTES]
    finally:
        transport.close()


async def remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

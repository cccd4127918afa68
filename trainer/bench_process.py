"""A measurement in a process of its own: memory that one used stays with its process, and so does what it broke."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.run.bench import Measures, Unmeasured
from async_rl.run.process import die_with_parent

END_S = 5.0  # for a process that was killed


class Answer(msgspec.Struct, frozen=True):
    """What the process says: its measures, or why there are none, which may be a result too."""

    measures: Measures
    error: str = ""
    unmeasured: bool = False


def measured_apart(
    work: Callable[[], Measures], timeout_s: float, what: object, *, start: Literal["fork", "spawn"] = "fork"
) -> Measures:
    """What `work` returns in a process of its own. Forked: importing torch takes longer than most steps do. But a GPU
    that anything has looked for cannot be used after a fork, so what needs one is to "spawn". Raises Unmeasured as
    `work` does, and AsyncRLError with what else went wrong there, or, naming `what`, when it takes too long or dies."""
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise AsyncRLError(f"a measurement took more than {timeout_s:.0f} s: {what}")
        said = msgspec.json.decode(ours.recv_bytes(), type=Answer)
    except EOFError as error:
        raise AsyncRLError(f"a measurement died: {what}") from error
    finally:
        process.kill()
        process.join(END_S)
    if said.unmeasured:
        raise Unmeasured(said.error)
    if said.error:
        raise AsyncRLError(said.error)
    return said.measures


def _answer(connection: Connection, work: Callable[[], Measures], parent: int) -> None:
    die_with_parent(parent)
    try:
        said = Answer(work())
    except Unmeasured as why:
        said = Answer({}, str(why), unmeasured=True)
    except Exception as error:
        said = Answer({}, f"{type(error).__name__}: {error}")
    connection.send_bytes(msgspec.json.encode(said))

"""What runs in a cell once its walls are up (`async_rl.sandbox.warden`), by kind: a script, of which
its output and its end are all there is; a program under test, which defines its functions and then answers calls; or
its tests, in a cell of their own (`async_rl.sandbox.judging`)."""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import os
import random
import sys
import traceback
from typing import Any, NoReturn

from async_rl.sandbox.channel import Channel
from async_rl.sandbox.judging import judge
from async_rl.sandbox.values import NotPlain, decode, encode

MEMORY, FORBIDDEN, PROCESSES, DISK, FILES = range(81, 86)  # exit codes
EXIT_NAMES = {MEMORY: "memory", FORBIDDEN: "forbidden", PROCESSES: "processes", DISK: "disk", FILES: "files"}
SOURCE = "<program>"
MOST_TEXT = 300  # characters of what an exception says
CHANNEL = 3  # the file that a program has for its judge
WALLS = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)
ERRNO_NAMES = {
    **dict.fromkeys(WALLS, FORBIDDEN),
    errno.EAGAIN: PROCESSES,
    errno.ENOSPC: DISK,
    errno.EFBIG: DISK,
    errno.EMFILE: FILES,
    errno.ENOMEM: MEMORY,
}
PRELOADED = (
    "array bisect calendar cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq "
    "io itertools json math operator random re statistics string struct textwrap time types typing unicodedata"
)


def warm_up() -> None:
    """Import, before any cell is forked, what programs import most."""
    for name in PRELOADED.split():
        __import__(name)
    compile("import math\n", SOURCE, "exec")


def run(kind: str) -> NoReturn:
    """As a cell's first process: what to run is in file 0."""
    os.environ.clear()
    os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd(), PATH="", LANG="C.UTF-8")
    sys.argv[:] = [SOURCE]
    random.seed(0)
    with open(0, encoding="utf-8", closefd=False) as file:
        given = json.load(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        code = {"script": script, "program": program, "judge": judge}[kind](given)
    except MemoryError:
        code = MEMORY
    os._exit(code)


def script(given: dict[str, Any]) -> int:
    """Run it as `python FILE` would; the exit code, by name where a wall stood in its way."""
    try:
        exec(compile(given["source"], SOURCE, "exec"), {"__name__": "__main__", "__builtins__": builtins})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        tell(error)
        code = wall_met(error) or 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF


def tell(error: BaseException) -> None:
    """Its traceback, from the program's own first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != SOURCE:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def wall_met(error: BaseException) -> int:
    """The exit code that says at which wall it failed; 0 when it was none."""
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return PROCESSES
    return ERRNO_NAMES.get(error.errno or 0, 0) if isinstance(error, OSError) else 0


def named(error: BaseException) -> str:
    """Why a program failed, in one word."""
    if isinstance(error, SyntaxError):
        return "syntax"
    if isinstance(error, SystemExit):
        return "exit"
    return EXIT_NAMES.get(wall_met(error), "error")


def program(given: dict[str, Any]) -> int:
    """Define what the source defines, say so, and answer calls until nobody asks any more."""
    channel = Channel(CHANNEL)
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    try:
        exec(compile(given["source"], SOURCE, "exec"), space)
    except BaseException as error:
        channel.send(raised(error))
        return 0
    channel.send({"ready": True})
    while True:
        try:
            question = channel.receive()
        except EOFError:
            return 0
        channel.send(answer(space, question))


def answer(space: dict[str, Any], question: Any) -> Any:
    """Of a call: what it returned, and its arguments if it changed them; or what it raised."""
    if question["call"] not in space:
        return {"raise": "NameError", "text": f"{question['call']} is not defined", "why": "undefined"}
    try:
        positional, named_ones = decode(question["args"]), decode(question["kwargs"])
        value = encode(space[question["call"]](*positional, **named_ones))
        after = encode(positional)
        return {"value": value, "args": None if after == question["args"] else after}
    except BaseException as error:
        return raised(error)


def raised(error: BaseException) -> Any:
    """As a built-in exception: the nearest one that it is derived from."""
    kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
    why = "result" if isinstance(error, NotPlain) else named(error)
    return {"raise": kind.__name__, "text": str(error)[:MOST_TEXT], "why": why}

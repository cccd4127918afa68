"""The watchdog's other half: a small process beside each of ours that ends it when it no longer moves.

    python -I -S watchdog_helper.py PAGE_FD NAME PARENT   started by `watchdog.Watchdog`, as a child of the watched

A thread could not do this: where C code holds the interpreter's lock no other thread runs. The watched process counts
up in a shared page, and writes there what it is about; this one reads it. So it needs nothing of the other but its
page, and imports nothing but the standard library. It is gone when the watched process is.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from typing import NamedTuple

PAGE_BYTES = 16384
BEATS = struct.Struct("<Qd")  # how often the process moved on, and its limit in seconds; at 0
TEXT = struct.Struct("<QI")  # odd while the text is being written, and the text's size; at TEXT_AT
TEXT_AT = BEATS.size
BODY_AT = TEXT_AT + TEXT.size

LOOK_S = 0.25
TRACES_S = 0.5  # for the watched process to write where its threads are
WRITE_S = 1.0
DUMP_SIGNAL = signal.SIGUSR2  # faulthandler's, in the watched process


class Said(NamedTuple):
    """What the watched process is about, and its last events with the monotonic times at which they happened."""

    what: str
    events: list[tuple[float, str]]


def read_text(page: mmap.mmap) -> Said:
    """A text that was whole when it was read; one that stays half-written is reported as such."""
    for _ in range(100):
        version, size = TEXT.unpack_from(page, TEXT_AT)
        body = bytes(page[BODY_AT : BODY_AT + size])
        if version % 2 == 0 and TEXT.unpack_from(page, TEXT_AT)[0] == version:
            what, events = json.loads(body)
            return Said(what, [(at, event) for at, event in events])
        time.sleep(0.001)
    return Said("it was just saying what comes next", [])


def last_words(name: str, said: Said, silent_s: float, now: float) -> str:
    events = "; ".join(f"{event} ({now - at:.0f} s ago)" for at, event in said.events) or "nothing"
    return (
        f"error: watchdog: {name} did not move for {silent_s:.1f} s and was ended; it was at: {said.what}; "
        f"before: {events}"
    )


def watch(page: mmap.mmap, parent: int, name: str) -> None:
    """Returns when the parent has ended by itself, and does not return otherwise: it may be the parent's group's."""
    beats, silent_s, looked = -1, 0.0, time.monotonic()
    while os.getppid() == parent:
        time.sleep(LOOK_S)
        now = time.monotonic()
        # Only time in which this process ran counts: a machine that was suspended, or a group that was stopped as a
        # whole, is nobody's fault.
        silent_s += min(now - looked, 2 * LOOK_S)
        looked = now
        seen, limit_s = BEATS.unpack_from(page, 0)
        if seen != beats:
            beats, silent_s = seen, 0.0
        elif silent_s > limit_s and os.getppid() == parent:
            end(parent, last_words(name, read_text(page), silent_s, now))


def end(parent: int, words: str) -> None:
    """Where its threads are, then `words` as its last line (it is stopped first, so that nothing follows), then the
    end of it, and of its group if it leads one: what it started must not outlive it."""
    leads = os.getpgid(parent) == parent
    os.kill(parent, DUMP_SIGNAL)
    time.sleep(TRACES_S)
    os.kill(parent, signal.SIGSTOP)
    write_line(words)
    os.kill(parent, signal.SIGKILL)
    if leads:
        os.killpg(parent, signal.SIGKILL)
    sys.exit(0)


def write_line(words: str) -> None:
    """To stderr, unless nobody reads there: a pipe that is full may be the very thing that the process waits for."""
    if select.select([], [2], [], WRITE_S)[1]:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{words}\n".encode()[: select.PIPE_BUF])


def main() -> None:
    parent = int(sys.argv[3])  # not getppid(): who has ended by now is not the one that took its place
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the watched process's to heed
    page = mmap.mmap(int(sys.argv[1]), PAGE_BYTES, access=mmap.ACCESS_READ)
    try:
        watch(page, parent, sys.argv[2])
    except ProcessLookupError:
        return  # it ended while it was being ended


if __name__ == "__main__":
    main()

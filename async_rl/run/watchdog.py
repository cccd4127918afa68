"""A process that no longer moves is ended, with a last line that says who waited for what, and for how long.

Every main loop tells its watchdog that it moves on (`beat`), and what takes long without a chance to say so gets a
limit of its own (`expect`):

    watchdog.beat("waits for a batch from the buffer")
    with watchdog.working("trains batch 12"):
        backend.step(...)

Who judges is another process (`watchdog_helper`), so it does not matter whether the main thread spins, sleeps, waits
for a lock or a socket, or holds the interpreter's lock in C code. It writes the stacks of all threads first.

Waits have limits and messages of their own (docs/waits.md); this is for what nobody thought of.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from async_rl.run import watchdog_helper
from async_rl.run.watchdog_helper import BEATS, BODY_AT, DUMP_SIGNAL, PAGE_BYTES, TEXT, TEXT_AT

EVENTS = 6  # as many last events are told
TEXT_CHARACTERS = 300  # of what and of each event: all fit into the page, whatever the characters


class Watchdog:
    """Of one process, used by its main thread alone. It watches from `start` on; before, and in a test or benchmark
    that starts none, its other methods only take note."""

    def __init__(self, name: str = "this process", limit_s: float = 300.0, work_s: float = 3600.0) -> None:
        self.name = name
        self._limit_s = limit_s
        self._work_s = work_s
        self._what = "starts"
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self._page: mmap.mmap | bytearray = bytearray(PAGE_BYTES)
        self._beats = self._texts = 0
        self._helper: subprocess.Popen[bytes] | None = None
        self._tell()

    def start(self) -> None:
        """Raises OSError when the process cannot be started."""
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        descriptor = _shared_memory()
        try:
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
            self._tell()
            self._helper = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", str(Path(watchdog_helper.__file__)), str(descriptor), self.name,
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(descriptor,),
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def beat(self, what: str) -> None:
        """The process moves on; what it is about now, and for whom it waits if it does. Cheap while the words stay."""
        if what != self._what:
            self._what = what
            self._tell()
        self._beats += 1
        BEATS.pack_into(self._page, 0, self._beats, self._limit_s)

    def note(self, event: str) -> None:
        """What happened; the last ones are told should the process get stuck later."""
        self._events.append((time.monotonic(), event[:TEXT_CHARACTERS]))
        self._tell()

    @contextmanager
    def expect(self, what: str, limit_s: float) -> Iterator[None]:
        """While inside, this limit holds instead: for a wait that ends by a limit of its own."""
        outer_what, outer_limit_s = self._what, self._limit_s
        self._limit_s = limit_s
        self.beat(what)
        try:
            yield
        finally:
            self._limit_s = outer_limit_s
            self.note(what)
            self.beat(outer_what)

    def working(self, what: str) -> AbstractContextManager[None]:
        """`expect` for work that takes as long as it takes, and cannot show meanwhile that it moves on."""
        return self.expect(what, self._work_s)

    def _tell(self) -> None:
        """Write the text; the helper takes it only between two even, equal version numbers."""
        body = json.dumps([self._what[:TEXT_CHARACTERS], list(self._events)]).encode()
        TEXT.pack_into(self._page, TEXT_AT, self._texts + 1, len(body))
        self._page[BODY_AT : BODY_AT + len(body)] = body
        self._texts += 2
        TEXT.pack_into(self._page, TEXT_AT, self._texts, len(body))
        BEATS.pack_into(self._page, 0, self._beats, self._limit_s)


def _shared_memory() -> int:
    """The descriptor of a page that another process can be given."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("async-rl-watchdog")
    else:
        descriptor, path = tempfile.mkstemp(prefix="async-rl-watchdog-")
        os.unlink(path)
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor

"""A log that peers cannot fill: of each kind of line so many a while, and a count of those that were left out.

A kind is a logger and the format of its line, before anything is put into it: so there are as many as the program has,
whoever sends what."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES = 100
WHILE_S = 10.0


class CalmFilter(logging.Filter):
    """For a handler: lets LINES lines of each kind through in each WHILE_S seconds. Errors with a traceback always."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # when its while began, and lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            return True
        kind, now = (record.name, str(record.msg)), self._clock()
        began, lines = self._kinds.get(kind, (now, 0))
        if now - began >= WHILE_S:
            left_out, began, lines = lines - LINES, now, 0
            if left_out > 0:
                record.msg, record.args = f"{record.getMessage()} ({left_out} such lines before were left out)", ()
        self._kinds[kind] = (began, lines + 1)
        return lines < LINES

"""Whether a process has ended, for tests that started or killed it."""

from __future__ import annotations

import contextlib
import time

import psutil


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether it ends within so long; a zombie has. It may vanish between any two looks at it."""
    ends = time.monotonic() + within_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)
    return True

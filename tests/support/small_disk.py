"""A disk that is full: what a process that may write no more meets."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow beyond 4 kB: a write that passes it fails half-way, as on a full disk. For the shortest time:
    the limit is the whole process's, and holds for the file that the test runner's own output goes to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""How a process lives with the allocators: that of the C library, and Python's collector of cycles."""

from __future__ import annotations

import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
KEPT_BYTES = 1 << 30  # about the most that mallopt's int can say
GROWTH_BYTES = 64 << 20
LARGEST_BYTES = 32 << 20  # the most that glibc takes as the size from which a block is mapped on its own


def keep_pages() -> None:
    """Let the allocator keep what it has once taken from the system: payloads come and go by the gigabyte, and a page
    that was just returned is zeroed anew at a tenth of the speed of a warm one (a third of the time of an ingest of 73
    kB payloads was this). The process so stays as large as its buffer has been. Does nothing without glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_TOP_PAD, GROWTH_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)


def settle() -> None:
    """Once a process has loaded what it keeps for good. The collector looks through everything only when what is young
    has grown to a quarter of what is old, and a model's libraries alone are some 400,000 objects: cycles that each step
    leaves behind would pile up to that (1 kB a step was measured) before any is freed.

    Twice, since only a look at everything counts what is old, and what was frozen before is then none of it. There is
    little to look at from then on, so everything is looked at as often as what is middle-aged: by default that is ten
    times as seldom, a thousand small steps, in which a trainer grew by half a megabyte."""
    gc.collect()
    gc.freeze()
    gc.collect()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1)

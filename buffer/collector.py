"""How a process that holds millions of attempts lives with Python's cycle collector and the C library's allocator.

The rules make no reference cycles: all that they let go of is freed at once, by reference counts. The collector cannot
know this, and from time to time looks at every container there is, which with a million groups stops the service for
seconds (buffer/bench_rules.py measures with this and, on request, without).
"""

from __future__ import annotations

import ctypes
import gc
import sys

YOUNG = 10_000  # new containers between two looks at the young ones; ten of these make a middle-aged look
NEVER = 1_000_000  # middle-aged looks between two at everything: years


def collect_young_only() -> None:
    """Let the collector look at young objects alone from now on, so that its cost does not depend on how much is held.
    What is there already is never looked at again. Call once, when a process is set up. The price: a cycle that lives
    through two collections is never freed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, NEVER)


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

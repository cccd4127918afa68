"""How a process that holds millions of attempts lives with Python's cycle collector.

The rules make no reference cycles: all that they let go of is freed at once, by reference counts. The collector cannot
know this, and from time to time looks at every container there is, which with a million groups stops the service for
seconds (buffer/bench_rules.py measures with this and, on request, without).
"""

from __future__ import annotations

import gc

from async_rl.run.pages import settle

YOUNG = 10_000  # new containers between two looks at the young ones; ten of these make a middle-aged look
NEVER = 1_000_000  # middle-aged looks between two at everything: years


def collect_young_only() -> None:
    """Let the collector look at young objects alone from now on, so that its cost does not depend on how much is held.
    What is there already is never looked at again. Call once, when a process is set up. The price: a cycle that lives
    through two collections is never freed."""
    settle()
    gc.set_threshold(YOUNG, 10, NEVER)

"""A process that has settled frees the cycles that its steps leave behind, however much it has loaded before."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from async_rl.run.pages import settle

class Node:
    pass

loaded = [[number] for number in range(400_000)]
settle()
kept, whole_looks = [], gc.get_stats()[2]["collections"]
for step in range(100_000):
    node = Node()
    node.itself = node
    kept = [*kept[-2000:], node]  # lives through looks at the young, so that only one at everything frees it
print(gc.get_stats()[2]["collections"] - whole_looks, sum(isinstance(each, Node) for each in gc.get_objects()))
"""


def test_everything_that_came_after_is_looked_at_though_what_was_loaded_is_much_more() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=100)
    whole_looks, alive = map(int, done.stdout.split())
    assert whole_looks > 0
    assert alive < 20_000  # of 100,000; 29,000 where only the young are looked at

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time

from inference.orphan_guard import OrphanGuard

PARENT = """
import multiprocessing, os, sys, time
from inference.orphan_guard import OrphanGuard

process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
process.guard = OrphanGuard()
process.start()
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_spawned_process_ends_when_its_parent_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1)
    assert is_alive(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_in_the_process_that_made_it_it_does_nothing() -> None:
    before = threading.active_count()
    again = pickle.loads(pickle.dumps(OrphanGuard()))
    assert threading.active_count() == before
    assert again.compute_hash() == OrphanGuard().compute_hash()
    assert multiprocessing.parent_process() is None or os.getppid()

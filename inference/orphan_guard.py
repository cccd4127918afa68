"""No process of an engine outlives the node, not even one that was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

LOOK_S = 0.05
TOLD_S = 60.0  # how long after it begins a process may take to know its parent


class OrphanGuard:
    """Put into what a parent hands to the processes that it spawns: where it is unpickled, a thread waits for the
    parent's end, and ends the process at once. The parent's end shows at a pipe, so no process id can be mistaken."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, int]:
        return {"owner": self._owner}

    def __setstate__(self, state: dict[str, int]) -> None:
        self._owner = state["owner"]
        if os.getpid() != self._owner:
            threading.Thread(target=_end_with_parent, name="orphan-guard", daemon=True).start()

    def compute_hash(self) -> str:
        """The same for all of them: it changes nothing of what is computed (vLLM hashes its configuration)."""
        return "orphan-guard"


def _end_with_parent() -> None:
    """What a process is spawned with is unpickled before it knows its parent."""
    deadline = time.monotonic() + TOLD_S
    while (parent := multiprocessing.parent_process()) is None:
        if time.monotonic() > deadline:
            return
        time.sleep(LOOK_S)
    parent.join()
    os._exit(1)

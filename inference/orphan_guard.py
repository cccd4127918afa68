"""No process of an engine outlives the node, not even one that was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading


class OrphanGuard:
    """Put into what a parent hands to the processes that it spawns: where it is unpickled, a thread waits for the
    parent's end, and ends the process at once. The parent's end shows at a pipe, so no process id can be mistaken."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, int]:
        return {"_owner": self._owner}

    def __setstate__(self, state: dict[str, int]) -> None:
        self._owner = state["_owner"]
        parent = multiprocessing.parent_process()
        if os.getpid() != self._owner and parent is not None:
            threading.Thread(target=_end_with, args=(parent,), name="orphan-guard", daemon=True).start()

    def compute_hash(self) -> str:
        """The same for all of them: it changes nothing of what is computed (vLLM hashes its configuration)."""
        return "orphan-guard"


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)

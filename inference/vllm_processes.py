"""The processes of a vLLM engine, and what they have in shared memory: none is there any more when it is closed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

SHARED = re.compile(r"psm_|sem\.mp-")  # names that Python gives to shared memory, and to locks


class EngineProcesses:
    """To be made when the engine is up: of processes that have died nobody knows what they had."""

    def __init__(self, engine: Any) -> None:
        manager = engine.engine_core.resources.engine_manager
        cores = [process.pid for process in getattr(manager, "processes", ())]  # none of its own on a Ray cluster
        self._pids = sorted({pid for core in cores for pid in _family(core)})
        theirs = {file for pid in self._pids for file in _mapped(pid)} - _mapped(os.getpid())
        self._files = [
            path for path in Path("/dev/shm").glob("*") if SHARED.match(path.name) and _inode(path) in theirs
        ]

    def kill(self) -> None:
        """A polite end takes them ten seconds, and saves nothing."""
        for pid in self._pids:
            if _command(pid).startswith("VLLM::"):  # else it is gone, and another may have its number
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def remove_files(self) -> None:
        """When they have ended. Python's tracker would do it too, with a warning, but not before this process ends."""
        for path in self._files:
            if path.exists():
                path.unlink()
                kind, name = ("semaphore", path.name[4:]) if path.name[:4] == "sem." else ("shared_memory", path.name)
                resource_tracker.unregister(f"/{name}", kind)


def _family(pid: int) -> Iterable[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from _family(int(child))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _mapped(pid: int) -> set[int]:
    """The files in shared memory that a process has mapped, by inode: under which name is not always said."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return set()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None

"""The processes of a vLLM engine, and what they have in shared memory: none is there any more when it is closed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARED = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-)\S+)$")  # rings of messages, and locks, of Python's own naming


class EngineProcesses:
    """To be made when the engine is up: of processes that have died nobody knows what they had."""

    def __init__(self, engine: Any) -> None:
        cores = [process.pid for process in engine.engine_core.resources.engine_manager.processes]
        self._pids = sorted({pid for core in cores for pid in _family(core)})
        self._files = {name for pid in self._pids for name in _shared_files(pid)} - set(_shared_files(os.getpid()))

    def clear(self) -> None:
        """After vLLM has ended them, or has tried to."""
        for pid in self._pids:
            if _command(pid).startswith("VLLM::"):  # else it is gone, and another has its number
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name in self._files:
            Path(name).unlink(missing_ok=True)


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


def _shared_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return [found[1] for line in lines if (found := SHARED.search(line))]
    return []

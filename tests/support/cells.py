"""A sandbox for tests, and what a program may have left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from async_rl.sandbox import Sandbox, SandboxError

SHARED_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run", "/", str(Path.home()), str(Path.cwd()))
GONE_S = 60.0  # for a killed keeper to be reaped


def sandbox_or_skip() -> Iterator[Sandbox]:
    try:
        sandbox = Sandbox()
    except SandboxError as error:
        if os.environ.get("ASYNC_RL_MUST_ISOLATE"):
            raise
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()


def named_processes(name: str) -> list[int]:
    """Those that call themselves so (prctl), as their children do."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "comm").read_text().strip() == name:
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def left_behind(name: str) -> list[str]:
    """Processes, files, shared memory and sockets of that name, on all of this machine."""
    deadline = time.monotonic() + GONE_S
    while (processes := named_processes(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    files = [f"{place}/{each}" for place in SHARED_PLACES if os.path.isdir(place) for each in os.listdir(place)]
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return [*map(str, processes), *(each for each in (*files, *sockets) if name in each), *foreign_memory()]


def foreign_memory() -> list[str]:
    """System V segments, queues and semaphores of users that nobody is."""
    found = []
    for kind in ("shm", "msg", "sem"):
        head, *lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
        user = head.split().index("uid")
        found += [line for line in lines if 1 << 30 <= int(line.split()[user]) < 1 << 31]
    return found


def children(sandbox: Sandbox) -> list[int]:
    """The warden's: keepers and cells."""
    deadline = time.monotonic() + GONE_S
    warden = psutil.Process(sandbox._process.pid)
    while (found := warden.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process.pid for process in found]

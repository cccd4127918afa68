"""Stands between a node and a program that it started: when the program has ended, or the node is gone or wants it to
end, so has all that the program started.

    python -I -S agent_guard.py PIPE COMMAND…     in a session of its own; PIPE is the reading end of one of the node

It ends as the program does: with its exit code, or 128 and the number of the signal that killed it. On Linux whoever
has lost its parent becomes a child of this process, so nobody gets away by leaving the session; elsewhere the session's
first group is what is killed. This is a script, run by its path: it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

NOT_STARTED = 127  # as a shell has it
DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and what it starts would too
LOOK_S = 60.0
SWEEP_S = 1.0  # for what is killed to be gone
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(pipe: int, command: list[str]) -> int:
    os.set_inheritable(pipe, False)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(ended, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        program = os.posix_spawnp(command[0], command, os.environ, setsigmask=(), setsigdef=DEFAULTS)
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    code: int | None = None
    while code is None:
        ready, _, _ = select.select([pipe, ended], [], [], LOOK_S)
        if pipe in ready:  # nothing is ever written there: the node has closed its end, or has ended
            sweep()
            os.killpg(0, signal.SIGKILL)
        with contextlib.suppress(BlockingIOError):
            os.read(ended, 4096)
        code, _ = reap(program)
    sweep()
    return code if code >= 0 else 128 - code


def reap(program: int = 0) -> tuple[int | None, bool]:
    """Take note of all children that have ended: the program's exit code if it is among them, and whether any child is
    left."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, False
        if not pid:
            return code, True
        if pid == program:
            code = os.waitstatus_to_exitcode(status)


def sweep() -> None:
    """Kill whatever descends from this process, until there is nothing."""
    gives_up = time.monotonic() + SWEEP_S
    while reap()[1] and time.monotonic() < gives_up:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def descendants() -> list[int]:
    """Of this process; none where there is no /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for each in found:  # which grows meanwhile
        found += [pid for pid, parent in parents.items() if parent == each]
    return found[1:]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

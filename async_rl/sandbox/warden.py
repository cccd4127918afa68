"""The process that makes cells: a bare interpreter, started once, that never sees what runs in them.

    whoever scores ──order, files──► warden ──fork──► keeper ──fork──► first process of a cell
                                                        │ (supervises: time, end)      (walls are up: inside.py)
    whoever scores ◄────────how it ended────────────────┘

An order is one message on a socket: what kind of cell, its limits, and the files that it gets. What the cell runs is
in one of these, so that no later cell finds it in the memory that it was forked from. The keeper puts the walls up,
waits for the end, and says how it came. A cell is a process namespace: when its first process has ended, by itself or
by the keeper, the kernel has ended all others in it, whatever sessions and parents they gave themselves; when the
keeper ends, so does that; and the keeper ends with the warden, the warden when nobody holds its socket any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import warnings
from typing import Any

from async_rl.sandbox import inside, walls
from async_rl.sandbox.limits import Limits

ORDER_BYTES = 1 << 12
MOST_ORDER_FILES = 8
FAULT_BYTES = 1 << 10
GO = b"."  # from one process to another: go on


def main() -> None:
    """Take orders until the socket's other ends are closed."""
    warnings.simplefilter("ignore")
    orders = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that have ended are nobody's business
    folders, hidden = walls.readable_folders()
    inside.warm_up()
    sys.path[:] = [place for place in sys.path if any(place.startswith(folder) for folder in folders)]
    orders.send(GO)
    while True:
        order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, MOST_ORDER_FILES)
        if not order:
            return
        start_keeper(orders, json.loads(order), files, folders, hidden)
        for file in files:
            os.close(file)


def start_keeper(orders: socket.socket, order: Any, files: list[int], folders: list[str], hidden: list[str]) -> None:
    """One keeper for one order. A root's keeper gets its user from here: it cannot give itself one."""
    with open("/proc/self/uid_map") as file:
        extents = file.read()
    of_root = os.getuid() == 0 and walls.spare_user(os.getpid(), extents) is not None
    ours, theirs = socket.socketpair()
    warden, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            ours.close()
            orders.close()
            Keeper(order, files, warden).run(theirs, folders, hidden, of_root)
        finally:
            os._exit(1)
    theirs.close()
    with ours:
        if of_root and ours.recv(1):
            user = walls.spare_user(pid, extents)
            assert user is not None
            walls.write_identity(str(pid), user, user, may_set_groups=True)
            ours.send(GO)


class Keeper:
    """One cell, from its walls to its end. `files[0]` is the socket to say how that came, the others the cell's:
    what to run, stdout, stderr, and more as its kind wants."""

    def __init__(self, order: Any, files: list[int], warden: int) -> None:
        self._warden = warden
        self._kind: str = order["kind"]
        self._limits = Limits(*order["limits"])
        self._word = socket.socket(fileno=files[0])
        self._files = files[1:]

    def run(self, warden: socket.socket, folders: list[str], hidden: list[str], of_root: bool) -> None:
        try:
            walls.default_signals()
            walls.die_with_parent()
            if os.getppid() != self._warden:
                return
            self._isolate(warden, folders, hidden, of_root)
            ours, theirs = os.pipe()
            fault, tell = os.pipe()
            start, pid = time.monotonic(), os.fork()
            if pid == 0:
                os.close(theirs)
                self._be_cell(ours, tell)
            for file in (ours, tell, *self._files):
                os.close(file)
        except (OSError, KeyError) as error:
            self._say({"missing": missing(error)})
            return
        end = self._supervise(pid, start)
        if lacking := os.read(fault, FAULT_BYTES):
            end["missing"] = lacking.decode()
        self._say(end)

    def _isolate(self, warden: socket.socket, folders: list[str], hidden: list[str], of_root: bool) -> None:
        if not of_root:
            user, group = os.getuid(), os.getgid()
        walls.first_to_go()
        walls.new_user_namespace()
        if of_root:
            warden.send(GO)
            if not warden.recv(1):
                raise OSError(0, "the warden could not map it", "a user of its own")
        else:
            walls.write_identity("self", user, group, may_set_groups=False)
        walls.new_namespaces()
        walls.new_root(self._limits.disk_mb, folders, hidden, of_root)
        walls.die_with_parent()

    def _be_cell(self, keeper: int, tell: int) -> None:
        """The cell's first process: the last walls, then what is to run. It never returns. What cannot be put up it
        says to `tell`, which is closed before anything runs: no exit code would do, as a program may choose its own."""
        try:
            walls.die_with_parent()
            if select.select([keeper], [], [], 0)[0]:  # closed: the keeper died before the line above
                os._exit(1)
            os.setsid()
            self._word.close()
            os.chdir(walls.PRIVATE)
            walls.keep_files([*self._files, tell])
            tell = len(self._files)
            walls.set_limits(self._limits)
            walls.drop_rights()
            walls.refuse_calls()
        except (OSError, KeyError) as error:
            os.write(tell, missing(error).encode()[:FAULT_BYTES])
            os._exit(1)
        os.close(tell)
        inside.run(self._kind)

    def _supervise(self, pid: int, start: float) -> dict[str, Any]:
        """Wait for the end of the cell, or bring it about: at the time limit, or when whoever ordered it lets go."""
        cell = os.pidfd_open(pid)
        left = start + self._limits.wall_s - time.monotonic()
        ready, _, _ = select.select([cell, self._word.fileno()], [], [], max(0.0, left))
        why = "ended" if cell in ready else "told" if ready else "timeout"
        if why != "ended":
            signal.pidfd_send_signal(cell, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        return {
            "why": why,
            "code": os.waitstatus_to_exitcode(status),
            "cpu": usage.ru_utime + usage.ru_stime,
            "memory": usage.ru_maxrss << 10,
            "wall": time.monotonic() - start,
        }

    def _say(self, word: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody wants to know any more
            self._word.send(json.dumps(word).encode())
        os._exit(0)


def missing(error: Exception) -> str:
    """What could not be had, and why."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a system call'}: {error.strerror}"
    return f"a list of calls for this kind of machine: {error}"


if __name__ == "__main__":
    main()

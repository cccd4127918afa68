"""Stands between a node and a program that it started: when the node is gone, so is the program and all in its group.

    python -I -S agent_guard.py PIPE COMMAND…     in a session of its own; PIPE is the reading end of one of the node

It ends as the program does: with its exit code, or 128 and the number of the signal that killed it. This is a script,
run by its path: it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys

NOT_STARTED = 127  # as a shell has it
DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and what it starts would too
LOOK_S = 60.0


def main(pipe: int, command: list[str]) -> int:
    os.set_inheritable(pipe, False)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    try:
        program = os.posix_spawnp(command[0], command, os.environ, setsigmask=(), setsigdef=DEFAULTS)
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    while True:
        ready, _, _ = select.select([pipe, ended], [], [], LOOK_S)
        if pipe in ready:  # nothing is ever written there: the node has ended
            os.killpg(0, signal.SIGKILL)
        if ended in ready:
            os.read(ended, 64)
        pid, status = os.waitpid(program, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

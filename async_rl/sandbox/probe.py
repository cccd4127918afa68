"""A program that tries the walls from inside, once in each sandbox: what it can do it should not."""

from __future__ import annotations

from async_rl.sandbox.limits import Limits

PROBE_LIMITS = Limits(wall_s=60, memory_mb=128, disk_mb=2, processes=4)  # a busy machine is no wall that fails
PROBE = f"""
import os, socket, threading

def refused(what, act, *arguments):
    try:
        act(*arguments)
    except (OSError, MemoryError, RuntimeError):
        return
    raise SystemExit(what)

def another():
    if os.fork() == 0:
        os.read(pipe[0], 1)
        os._exit(0)

if os.getuid() == 0 or os.getpid() != 1:
    raise SystemExit("it is not alone")
for place in ("/proc/self", "/sys/kernel", "/etc/passwd", "/bin/sh", "/var", "/run"):
    refused(place, os.stat, place)
refused("writing to the root", open, "/x", "w")
refused("writing to the modules", open, os.path.dirname(os.__file__) + "/x", "w")
refused("memory", bytearray, {PROBE_LIMITS.memory_mb} << 20)
refused("a program", os.execv, "/bin/sh", ["sh"])
pipe = os.pipe()
for _ in range({PROBE_LIMITS.processes} - 1):
    another()
refused("more processes", another)
"""

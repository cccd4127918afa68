"""Programs that mean no harm run as they would elsewhere, within limits, and a sandbox that ends takes all along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from cells import children, named_processes

from async_rl.sandbox import DEFAULT, Limits, Sandbox, SandboxError, run_python
from async_rl.sandbox.box import shared
from async_rl.sandbox.cell import reason_of
from async_rl.sandbox.walls import spare_user

SHORT = Limits(wall_s=30, cpu_s=10)


def test_a_program_gives_what_it_prints(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('ä', 1 + 1)\nprint('so', file=sys.stderr)", SHORT)
    assert (result.stdout, result.stderr, result.reason) == ("ä 2\n", "so\n", "ok")
    assert result.seconds > 0


def test_a_traceback_begins_at_the_programs_own_line(sandbox: Sandbox) -> None:
    result = sandbox.run("def f():\n    return 1 / 0\nprint('before')\nf()", SHORT)
    assert result.reason == "error"
    assert result.stdout == "before\n"
    assert "inside.py" not in result.stderr
    assert [line.strip() for line in result.stderr.splitlines()] == [
        "Traceback (most recent call last):",
        'File "<program>", line 4, in <module>',
        'File "<program>", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys\nsys.exit()", "ok"),
        ("raise SystemExit(0)", "ok"),
        ("raise SystemExit(3)", "error"),
        ("import sys\nsys.exit('no')", "error"),
        ("f(", "error"),
        ("import os\nos._exit(0)", "ok"),
        ("import os\nos.abort()", "signal"),
        ("raise MemoryError", "memory"),
        ("import numpy", "error"),
        ("input()", "error"),
        ("x = 0 if __name__ == '__main__' else 1 / 0", "ok"),
    ],
)
def test_how_it_ended_has_a_name(source: str, reason: str, sandbox: Sandbox) -> None:
    assert sandbox.run(source, SHORT).reason == reason


def test_a_program_has_the_standard_library_a_place_to_write_and_threads(sandbox: Sandbox) -> None:
    source = """
import asyncio, concurrent.futures, csv, lzma, os, sqlite3, ssl, subprocess, tempfile, threading, xml.etree.ElementTree
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 1000)
with open("here", "w") as file:
    file.write("y")
assert os.listdir() == ["here"] and os.getcwd() == os.environ["HOME"], os.listdir()
sqlite3.connect("db").execute("create table t (x)")
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
async def main():
    await asyncio.sleep(0)
    return 7
print(asyncio.run(main()))
"""
    result = sandbox.run(source, SHORT)
    assert (result.stdout, result.reason) == ("7\n", "ok"), result.stderr


@contextlib.contextmanager
def another_sandbox() -> Iterator[Sandbox]:
    own = Sandbox()
    yield own
    own.close()


def test_nothing_of_the_environment_or_of_an_earlier_program_is_there(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    with another_sandbox() as own:
        result = own.run("import os\nprint(sorted(os.environ), os.listdir(), os.getuid())", SHORT)
        assert result.stdout == "['HOME', 'LANG', 'PATH', 'TMPDIR'] [] 1000\n"
    sandbox.run("import sys\nopen('left', 'w').write('x')\nsys.modules['left'] = 1", SHORT)
    result = sandbox.run("import os, sys\nprint(os.listdir(), 'left' in sys.modules, os.listdir('/tmp'))", SHORT)
    assert result.stdout == "[] False []\n"


def test_the_same_program_gives_the_same_again(sandbox: Sandbox) -> None:
    source = "import random\nprint(random.random(), hash('a'), list({'x', 'y', 'z', 'w'}))"
    first = sandbox.run(source, SHORT)
    with another_sandbox() as other:
        assert other.run(source, SHORT).stdout == sandbox.run(source, SHORT).stdout == first.stdout != ""


def test_only_the_standard_library_can_be_read(sandbox: Sandbox) -> None:
    source = """
import os
found = {name for _, folders, _ in os.walk("/") for name in folders}
print("asyncio" in found, "async_rl" in found, "msgspec" in found, "etc" in found)
"""
    assert sandbox.run(source, SHORT).stdout == "True False False False\n"


def test_many_programs_at_once_do_not_mix(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as pool:
        sources = [f"open('n', 'w').write('{n}')\nprint(open('n').read())" for n in range(24)]
        results = list(pool.map(lambda source: sandbox.run(source, SHORT), sources))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(24)]
    assert children(sandbox) == []


def test_open_files_and_processes_of_ours_stay_what_they_were(sandbox: Sandbox) -> None:
    sandbox.run("print(1)", SHORT)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        sandbox.run("print(1)", SHORT)
        sandbox.judge("x = 1", "", "assert f() == 1", "", SHORT)
    assert len(os.listdir("/proc/self/fd")) <= files  # fewer where others' ended meanwhile
    assert threading.active_count() <= threads


def test_a_sandbox_that_is_closed_takes_its_programs_along(sandbox: Sandbox) -> None:
    name = f"closed-{os.getpid()}"
    with another_sandbox() as own:
        thread = start_sleeper(own.run, name)
        wait_for(lambda: named_processes(name) != [])
    thread.join(60)
    wait_for(lambda: named_processes(name) == [])
    assert not thread.is_alive()


def test_a_program_that_is_killed_from_outside_is_no_programs_fault(sandbox: Sandbox) -> None:
    name = f"victim-{os.getpid()}"
    thread = start_sleeper(sandbox.run, name)
    wait_for(lambda: len(named_processes(name)) == 2)
    os.kill(min(named_processes(name)), signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()


def start_sleeper(run: Callable[[str, Limits], object], name: str) -> threading.Thread:
    def call() -> None:
        with pytest.raises(SandboxError):
            run(SLEEPER % name, Limits(wall_s=600))

    thread = threading.Thread(target=call)
    thread.start()
    return thread


SLEEPER = "import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'%s')\nos.fork() or os.setsid()\ntime.sleep(600)"


def test_killing_whoever_runs_programs_ends_them(sandbox: Sandbox, tmp_path: Path) -> None:
    name = f"orphan-{os.getpid()}"
    code = f"from async_rl.sandbox import Limits, run_python\nrun_python({SLEEPER % name!r}, Limits(wall_s=600))"
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], cwd=tmp_path)
    wait_for(lambda: len(named_processes(name)) == 2)
    wardens = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait(60)
    wait_for(lambda: named_processes(name) == [] and not any(process.is_running() for process in wardens))


def test_a_warden_that_died_is_replaced(sandbox: Sandbox) -> None:
    assert run_python("print(1)", SHORT).stdout == "1\n"
    warden = psutil.Process(shared()._process.pid)
    os.kill(warden.pid, signal.SIGKILL)
    wait_for(lambda: warden.status() == psutil.STATUS_ZOMBIE)
    assert run_python("print(2)", SHORT).stdout == "2\n"


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_machine_that_cannot_isolate_is_refused_with_what_is_missing(sandbox: Sandbox) -> None:
    """Here: whoever may not make namespaces, as in most containers."""
    code = (
        "import ctypes, sys\n"
        "from async_rl.sandbox import walls\n"
        "from async_rl.sandbox import seccomp\n"
        "seccomp.KILLED = {'unshare': seccomp.KILLED['unshare']}\n"
        "seccomp.KILL, seccomp.REFUSED, seccomp.PR_SET_PDEATHSIG = seccomp.ERRNO | 1, {}, 99\n"
        "walls.prctl(38, '', 1); walls.refuse_calls()\n"
        "from async_rl.rewards import load_rewards\n"
        "load_rewards([{'kind': 'code'}])\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert 'SandboxError: [[task.reward]] of kind "code": this machine cannot isolate programs' in message
    assert "a user namespace: Operation not permitted" in message
    assert "max_user_namespaces" in message


@pytest.mark.parametrize(
    ("why", "code", "cpu", "reason"),
    [
        ("ended", 0, 0.1, "ok"),
        ("ended", 1, 0.1, "error"),
        ("timeout", -9, 0.1, "timeout"),
        ("told", -9, 0.1, "told"),
        ("told", -9, 4.0, "cpu"),
        ("told", 0, 0.1, "ok"),
        ("ended", -9, 4.0, "cpu"),
        ("ended", -9, 2.6, "cpu"),  # of 5 seconds, by the kernel's count
        ("ended", -9, 0.1, "killed"),
        ("ended", -24, 0.1, "cpu"),
        ("ended", -31, 0.1, "forbidden"),
        ("ended", -11, 0.1, "signal"),
        ("ended", 81, 0, "memory"),
    ],
)
def test_an_end_in_one_word(why: str, code: int, cpu: float, reason: str) -> None:
    assert reason_of(why, code, cpu, DEFAULT) == reason


def test_a_spare_user_is_nobody_elses() -> None:
    assert spare_user(77, "         0          0 4294967295\n") == (1 << 30) + 77
    inside = [spare_user(pid, "0 100000 65536\n") for pid in range(1000, 1200)]
    assert all(user is not None and 32768 <= user < 65535 for user in inside)
    assert len(set(inside)) == 200
    assert spare_user(77, "0 1000 1\n") is None

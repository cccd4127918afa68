"""The watchdog in real processes, whose main threads hang in every way a main thread can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from async_rl.run.watchdog import Watchdog
from async_rl.run.watchdog_helper import LOOK_S, TRACES_S

LIMIT_S = 1.0
FRAME = """
import ctypes, os, queue, re, signal, socket, subprocess, sys, threading, time
from async_rl.run.watchdog import Watchdog
watchdog = Watchdog("node-7", {limit_s})
watchdog.start()
watchdog.note("took 3 leases")
print("begins", flush=True)
"""
HANGS = {
    "spins": "while True: pass",
    "sleeps in C with the interpreter's lock": """
        library = ctypes.PyDLL(None)
        while True: library.sleep(60)  # any signal wakes it
    """,
    "matches for ever, with the interpreter's lock": "re.match('(a+)+$', 'a' * 40 + 'b')",
    "waits for a socket": "a, b = socket.socketpair(); a.recv(1)",
    "waits for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waits for a queue": "queue.SimpleQueue().get()",
    "waits for a child": "subprocess.run(['sleep', '60'])",
    "is deaf to signals": """
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True: pass
    """,
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


def run(body: str, limit_s: float = LIMIT_S, leads_group: bool = True) -> tuple[int, list[str], float]:
    """How the process ended, the lines of its stderr, and how long that took from when it began to hang."""
    source = FRAME.format(limit_s=limit_s) + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=leads_group,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            began = time.monotonic()
            _, errors = process.communicate(timeout=40)
            return process.returncode, errors.strip().splitlines(), time.monotonic() - began
        finally:
            process.kill()


@pytest.mark.parametrize("way", HANGS)
def test_a_main_thread_that_hangs_is_ended_and_the_last_line_says_at_what(way: str) -> None:
    hang = textwrap.dedent(HANGS[way]).strip()
    code, lines, took_s = run(f'watchdog.beat("waits for a batch from the buffer")\n{hang}')
    assert code == -signal.SIGKILL
    assert lines[-1].startswith("error: watchdog: node-7 did not move for ")
    assert "it was at: waits for a batch from the buffer; before: took 3 leases (" in lines[-1]
    assert LIMIT_S <= took_s < LIMIT_S + TRACES_S + 20 * LOOK_S
    if way not in ("is stopped", "is deaf to signals"):
        assert "Current thread" in "".join(lines)  # the stacks come first


def test_of_a_process_that_ends_before_its_watcher_has_begun_nothing_stays() -> None:
    """A watcher that then watched whoever inherited it would hold stderr open, and end that one in the end."""
    source = "import os; from async_rl.run.watchdog import Watchdog; Watchdog('brief').start(); os._exit(7)"
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-P", "-c", source], stderr=subprocess.PIPE, text=True) as process:
            try:
                _, errors = process.communicate(timeout=30)
                assert (process.returncode, errors) == (7, "")
            finally:
                process.kill()


def test_a_process_that_moves_on_is_left_alone_and_takes_its_watcher_along() -> None:
    body = """
        print(watchdog._helper.pid, flush=True)
        for _ in range(30):
            watchdog.beat("works")
            time.sleep(0.1)
    """
    source = FRAME.format(limit_s=LIMIT_S) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr) == (0, "")
    helper = int(done.stdout.split()[1])
    _gone(helper)


def test_work_that_cannot_say_that_it_moves_has_a_limit_of_its_own() -> None:
    body = """
        with watchdog.expect("trains batch 12", 30.0):
            time.sleep(3 * {limit})
        watchdog.beat("draws")
        with watchdog.expect("writes a checkpoint", 0.1):
            time.sleep(60)
    """.replace("{limit}", str(LIMIT_S))
    code, lines, took_s = run(body)
    assert code == -signal.SIGKILL
    assert "it was at: writes a checkpoint; before: took 3 leases (" in lines[-1]
    assert "trains batch 12 (" in lines[-1]
    assert took_s > 3 * LIMIT_S


def test_the_limit_that_held_before_holds_again_afterwards() -> None:
    body = """
        with watchdog.expect("trains", 60.0):
            pass
        while True: pass
    """
    code, _, took_s = run(body)
    assert code == -signal.SIGKILL
    assert took_s < 20


def test_what_an_ended_process_has_started_ends_with_it() -> None:
    body = """
        child = subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        print(child.pid, file=sys.stderr, flush=True)
        while True: pass
    """
    code, lines, _ = run(body)
    assert code == -signal.SIGKILL
    _gone(int(lines[0]))


def test_a_process_in_a_group_of_others_ends_alone() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=False) as bystander:
        code, _, _ = run("while True: pass", leads_group=False)
        assert code == -signal.SIGKILL
        assert bystander.poll() is None
        bystander.kill()


def test_a_full_pipe_that_nobody_reads_does_not_save_a_process(tmp_path: Path) -> None:
    source = FRAME.format(limit_s=LIMIT_S) + "while True: os.write(2, b'x' * 4096)"
    read, write = os.pipe()
    try:
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen([sys.executable, "-P", "-c", source], stdout=out, stderr=write)
            assert process.wait(40) == -signal.SIGKILL
    finally:
        os.close(read)
        os.close(write)


def test_a_group_that_was_stopped_as_a_whole_may_go_on() -> None:
    body = """
        end = time.monotonic() + 6 * {limit}
        while time.monotonic() < end:
            watchdog.beat("works")
            time.sleep(0.05)
    """.replace("{limit}", str(LIMIT_S))
    source = FRAME.format(limit_s=LIMIT_S) + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(3 * LIMIT_S)
        os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(40) == 0


def test_words_of_any_length_and_alphabet_fit() -> None:
    watchdog = Watchdog()
    for _ in range(10):
        watchdog.note("\N{OLD HUNGARIAN CAPITAL LETTER A}" * 1000)
        watchdog.beat("\0" * 1000)


def _gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)

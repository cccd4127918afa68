"""The watchdog in real processes, whose main threads hang in every way a main thread can."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gone import gone

from async_rl.run import watchdog_helper
from async_rl.run.watchdog import Watchdog
from async_rl.run.watchdog_helper import BEATS, LOOK_S, PAGE_BYTES

LIMIT_S = 1.0
# The limit holds from when the process begins to hang: on a busy machine its start alone may take longer.
FRAME = """
import ctypes, os, queue, re, select, signal, socket, subprocess, sys, threading, time
from async_rl.run.watchdog import Watchdog
watchdog = Watchdog("node-7", 60.0)
watchdog.start()
watchdog.note("took 3 leases")
print("begins", flush=True)
watchdog._limit_s = {limit_s}
watchdog.beat("begins")
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


def run(body: str, leads_group: bool = True) -> tuple[int, list[str]]:
    """How the process ended, and the lines of its stderr."""
    source = FRAME.format(limit_s=LIMIT_S) + textwrap.dedent(body)
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
            _, errors = process.communicate(timeout=120)
            return process.returncode, errors.strip().splitlines()
        finally:
            process.kill()


def ended_within(limit_s: float, last_line: str) -> bool:
    """By the watcher's own account, which is not of a clock's time but of that in which it ran."""
    said = re.search(r"did not move for ([0-9.]+) s and was ended", last_line)
    assert said is not None, last_line
    return limit_s <= float(said[1]) <= limit_s + 2 * LOOK_S + 0.1  # the number is rounded


@pytest.mark.parametrize("way", HANGS)
def test_a_main_thread_that_hangs_is_ended_and_the_last_line_says_at_what(way: str) -> None:
    hang = textwrap.dedent(HANGS[way]).strip()
    for _ in range(3):
        code, lines = run(f'watchdog.beat("waits for a batch from the buffer")\n{hang}')
        assert code == -signal.SIGKILL
        assert lines[-1].startswith("error: watchdog: node-7 did not move for ")
        assert "it was at: waits for a batch from the buffer; before: took 3 leases (" in lines[-1]
        assert ended_within(LIMIT_S, lines[-1])
        if way in ("is stopped", "is deaf to signals") or "Current thread" in "".join(lines):
            break  # the stacks come first
    else:  # one that gets no processor for TRACES_S writes none, but not three times
        raise AssertionError(f"no stacks: {lines}")


def test_of_a_process_that_ends_before_its_watcher_has_begun_nothing_stays() -> None:
    """A watcher that then watched whoever inherited it would hold stderr open, and end that one in the end."""
    source = "import os; from async_rl.run.watchdog import Watchdog; Watchdog('brief').start(); os._exit(7)"
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-P", "-c", source], stderr=subprocess.PIPE, text=True) as process:
            try:
                _, errors = process.communicate(timeout=120)
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
    source = FRAME.format(limit_s=60.0) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    helper = int(done.stdout.split()[1])
    assert gone(helper)


def test_one_that_moves_within_its_limit_is_never_ended_and_one_that_stops_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own, as the limit is short."""
    page, ends, looks = bytearray(PAGE_BYTES), [], 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks <= 100 and looks % 3 == 0:  # it moves every 0.75 s
            BEATS.pack_into(page, 0, looks, LIMIT_S)

    def end(_parent: int, words: str) -> None:
        ends.append(looks)
        raise InterruptedError(words)

    monkeypatch.setattr(watchdog_helper, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: looks * LOOK_S))
    monkeypatch.setattr(watchdog_helper, "end", end)
    monkeypatch.setattr(watchdog_helper, "read_text", lambda _: watchdog_helper.Said("works", []))
    BEATS.pack_into(page, 0, 1, LIMIT_S)
    with pytest.raises(InterruptedError, match=r"node-7 did not move for 1\.2 s"):
        watchdog_helper.watch(page, os.getppid(), "node-7")  # type: ignore[arg-type]
    assert ends == [99 + 5]


def test_work_that_cannot_say_that_it_moves_has_a_limit_of_its_own() -> None:
    body = """
        with watchdog.expect("trains batch 12", 60.0):
            time.sleep(3 * {limit})
        watchdog.beat("draws")
        with watchdog.expect("writes a checkpoint", 0.1):
            time.sleep(600)
    """.replace("{limit}", str(LIMIT_S))
    code, lines = run(body)
    assert code == -signal.SIGKILL
    assert "it was at: writes a checkpoint; before: took 3 leases (" in lines[-1]
    assert "trains batch 12 (" in lines[-1]


def test_the_limit_that_held_before_holds_again_afterwards() -> None:
    body = """
        with watchdog.expect("trains", 60.0):
            pass
        while True: pass
    """
    code, lines = run(body)
    assert code == -signal.SIGKILL
    assert ended_within(LIMIT_S, lines[-1])


def test_what_an_ended_process_has_started_ends_with_it() -> None:
    body = """
        with watchdog.expect("starts", 60.0):
            child = subprocess.Popen(["sleep", "600"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            print(child.pid, file=sys.stderr, flush=True)
        while True: pass
    """
    code, lines = run(body)
    assert code == -signal.SIGKILL
    assert gone(int(lines[0]))


def test_a_process_in_a_group_of_others_ends_alone() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=False) as bystander:
        try:
            code, _ = run("while True: pass", leads_group=False)
            assert code == -signal.SIGKILL
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_full_pipe_that_nobody_reads_does_not_save_a_process(tmp_path: Path) -> None:
    source = FRAME.format(limit_s=LIMIT_S) + "while True: os.write(2, b'x' * 4096)"
    read, write = os.pipe()
    try:
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen([sys.executable, "-P", "-c", source], stdout=out, stderr=write)
            assert process.wait(120) == -signal.SIGKILL
    finally:
        os.close(read)
        os.close(write)


def test_a_group_that_was_stopped_as_a_whole_may_go_on() -> None:
    limit_s = 5.0  # on a busy machine the watcher may run long before the one it watches
    body = """
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            watchdog.beat("works")
    """
    source = FRAME.format(limit_s=limit_s) + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(limit_s + 1.5)
            os.killpg(process.pid, signal.SIGCONT)
            time.sleep(4 * LOOK_S)  # it is looked at meanwhile
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_words_of_any_length_and_alphabet_fit() -> None:
    watchdog = Watchdog()
    for _ in range(10):
        watchdog.note("\N{OLD HUNGARIAN CAPITAL LETTER A}" * 1000)
        watchdog.beat("\0" * 1000)

"""No deadline reads the wall clock: it may jump as it likes, and a run does not notice."""

from __future__ import annotations

import ast
import random
import time
from pathlib import Path

import pytest
from buffer_house import PATIENCE_S, V1, House, confirm, deliver, receive, take_leases

from async_rl.wire.messages import Batch, Draw

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_rl", "buffer", "inference", "trainer")
WALL_CLOCK = ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")

# Where the wall clock is read, and for what.
READERS = {
    ("async_rl/wire/client.py", "time.time_ns()"): "a session's number, which has to differ from earlier ones",
    ("async_rl/wire/server.py", "time.time_ns()"): "a session's number, which has to differ from earlier ones",
    ("async_rl/run/status.py", "time.time()"): "how old a file is, for people",
    ("async_rl/run/bench.py", "time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())"): "a benchmark's date",
    ("async_rl/run/bench.py", "time.gmtime()"): "a benchmark's date",
    ("trainer/trackers.py", "time.time()"): "event files carry the date",
    ("inference/agent_forms.py", "time.time()"): "an answer of the OpenAI form carries the date",
}


def wall_clock_calls(path: Path) -> set[str]:
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "time"
        and node.func.attr in WALL_CLOCK
    }


def test_the_wall_clock_is_read_where_a_date_is_meant_and_nowhere_else() -> None:
    found = {
        (str(path.relative_to(ROOT)), call)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for call in wall_clock_calls(path)
    }
    assert found == READERS.keys()


def test_no_module_takes_the_clock_by_another_name() -> None:
    """`from time import time` would hide from the check above."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), path


class JumpingClock:
    """Up to a day forwards or back at every look."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._real = time.time

    def seconds(self) -> float:
        return self._real() + self._random.uniform(-86400, 86400)

    def nanoseconds(self) -> int:
        return int(self.seconds() * 1e9)


def test_a_buffer_its_node_and_its_trainer_do_not_notice_a_clock_that_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path)
    try:
        trainer, node = house.trainer(), house.node(wants=8)
        clock = JumpingClock()
        monkeypatch.setattr(time, "time", clock.seconds)
        monkeypatch.setattr(time, "time_ns", clock.nanoseconds)
        for step in range(2):
            deliver(node, take_leases(node, 4)) if step == 0 else None
            trainer.send(Draw(step))
            if step == 0:
                confirm(trainer, receive(trainer, Batch).message, V1)
        time.sleep(5 * 0.1)  # some heartbeats; nobody is taken for lost
        assert house.service.status().nodes[0].name == "node"
        assert house.service.status().trainer == "trainer"
        assert house.failure is None
    finally:
        house.close()


def test_a_client_that_starts_again_after_the_clock_was_set_back_takes_its_lost_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path)
    try:
        house.trainer()
        first = house.node("node")
        while not house.service.status().nodes:
            time.sleep(0.02)
        with first._lock:  # else its thread might say goodbye in between
            first._closing = True  # it dies: no goodbye, no beat
            first._connected = False
            first._wake()
        house._server._peers["node"].silence_s = 0.3
        deadline = time.monotonic() + PATIENCE_S
        while house.service.status().nodes:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)
        house.node("node")
        deadline = time.monotonic() + PATIENCE_S
        while not house.service.status().nodes:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        house.close()

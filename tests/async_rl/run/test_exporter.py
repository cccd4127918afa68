"""Metrics as a Prometheus meets them: files that name targets, real scrapes, and callers that mean no good."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from scraping import scrape, targets

from async_rl.config import Config, ModelConfig, RunConfig
from async_rl.run import exporter as exporter_module
from async_rl.run.checks import dry_run_table
from async_rl.run.directory import RunDirectory
from async_rl.run.exporter import MAX_REQUESTS, Exporter, Histogram, Metric, link_reading
from async_rl.run.launch import child_environment

GROUPS = Metric("gauge", "async_rl_test_groups", "Groups.")
TOKENS = Metric("counter", "async_rl_test_tokens_total", "Tokens.")
PLACES = Metric("gauge", "async_rl_test_attempts", "Attempts by place.", "place")
PUSH = Metric("histogram", "async_rl_test_push_seconds", "Pushes.")
UNKNOWN = Metric("gauge", "async_rl_test_version", "A version.")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Exporter, str]]:
    """An exporter that serves, and its address."""
    exporter = Exporter()
    with exporter.serve(tmp_path / "prometheus", "node-0", {"run": "small", "pool": "inference"}):
        yield exporter, targets(tmp_path / "prometheus")["node-0"]["address"]


def test_a_scrape_finds_the_newest_reading_under_prometheus_names(served: tuple[Exporter, str]) -> None:
    exporter, address = served
    pushes = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        pushes.observe(seconds)
    exporter.publish({GROUPS: 1})
    exporter.publish({GROUPS: 3, TOKENS: 1234, PLACES: {"leased": 5, "ready": 0}, PUSH: pushes.read(), UNKNOWN: None})
    samples = scrape(address)
    assert {name: value for name, value in samples.items() if name.startswith("async_rl_")} == {
        "async_rl_test_groups": 3,
        "async_rl_test_tokens_total": 1234,
        'async_rl_test_attempts{place="leased"}': 5,
        'async_rl_test_attempts{place="ready"}': 0,
        'async_rl_test_push_seconds_bucket{le="0.1"}': 2,
        'async_rl_test_push_seconds_bucket{le="1.0"}': 3,
        'async_rl_test_push_seconds_bucket{le="+Inf"}': 4,
        "async_rl_test_push_seconds_count": 4,
        "async_rl_test_push_seconds_sum": pytest.approx(7.65),
    }
    assert samples["process_resident_memory_bytes"] > 1e6


def test_what_was_read_before_does_not_change_a_reading() -> None:
    pushes = Histogram((1.0,))
    before = pushes.read()
    pushes.observe(0.5)
    assert (before.buckets, before.total) == ((("1.0", 0.0), ("+Inf", 0.0)), 0.0)


def test_the_file_names_the_target_and_is_gone_before_the_port_is_closed(tmp_path: Path) -> None:
    folder, exporter = tmp_path / "prometheus", Exporter()
    with exporter.serve(folder, "trainer", {"run": "small", "pool": "trainer"}):
        target = targets(folder)["trainer"]
        assert (target["run"], target["pool"]) == ("small", "trainer")
        assert scrape(target["address"])["process_start_time_seconds"] > 0
    assert list(folder.iterdir()) == []
    with pytest.raises(urllib.error.URLError):
        scrape(target["address"])


def test_a_loop_is_asked_for_a_reading_a_few_times_a_second_and_never_when_nobody_serves(tmp_path: Path) -> None:
    exporter, asked = Exporter(), []

    def read() -> dict[Metric, float]:
        asked.append(1)
        return {}

    exporter.offer(0.0, read)
    assert asked == []
    with exporter.serve(tmp_path, "buffer", {}):
        for tick in range(100):
            exporter.offer(100 + tick / 100, read)  # for a second, a hundred times
        assert len(asked) == 2
    exporter.offer(1e6, read)
    assert len(asked) == 2


def test_a_scrape_never_mixes_two_readings(served: tuple[Exporter, str]) -> None:
    exporter, address = served
    over = threading.Event()

    def work() -> None:
        issued = 0
        while not over.wait(0.0002):  # so that whoever scrapes gets the interpreter too
            issued += 1
            exporter.publish({TOKENS: issued, PLACES: {"leased": issued}})

    loop = threading.Thread(target=work)
    exporter.publish({TOKENS: 0, PLACES: {"leased": 0}})
    loop.start()
    try:
        seen = [scrape(address) for _ in range(50)]
    finally:
        over.set()
        loop.join()
    pairs = [(s["async_rl_test_tokens_total"], s['async_rl_test_attempts{place="leased"}']) for s in seen]
    assert [one for one, other in pairs if one != other] == []
    assert len(set(pairs)) > 1, "the loop did not run beside the scrapes"


def test_nobody_but_this_machine_can_connect(served: tuple[Exporter, str]) -> None:
    _, address = served
    port = int(address.rpartition(":")[2])
    assert address.startswith("127.0.0.1:")
    for other in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|Cannot assign|not available|unreachable"):
            socket.create_connection((other, port), 60).close()


@pytest.mark.timeout(240)
def test_hostile_requests_cost_the_one_who_sends_them_and_nobody_else(
    served: tuple[Exporter, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, address = served
    exporter.publish({GROUPS: 3})
    monkeypatch.setattr(exporter_module._Handler, "timeout", 3.0)
    host, port = address.split(":")
    for request in (b"\x00\xff\r\n\r\n", b"GET " + b"a" * 100_000, b"POST / HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
        with socket.create_connection((host, int(port)), 60) as caller:
            caller.sendall(request)
    silent = [socket.create_connection((host, int(port)), 60) for _ in range(3 * MAX_REQUESTS)]
    most = [0]

    def hung_up_on() -> int:
        most[0] = max(most[0], sum("process_request_thread" in thread.name for thread in threading.enumerate()))
        return sum(is_hung_up(caller) for caller in silent)

    eventually(lambda: hung_up_on() >= 2 * MAX_REQUESTS, ())
    assert most[0] <= 2 * MAX_REQUESTS  # each may be at its end, its room already given to the next
    eventually(lambda: scrape(address)["async_rl_test_groups"] == 3, (OSError,))
    for caller in silent:
        caller.close()
    eventually(lambda: scrape(address)["async_rl_test_groups"] == 3, (OSError,))  # the room of these is yet to be had
    assert capfd.readouterr() == ("", "")


def is_hung_up(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return caller.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def eventually(condition: Callable[[], bool], passing: tuple[type[Exception], ...]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if condition():
                return
        except passing:
            pass
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_without_prometheus_client_a_line_says_so_and_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    worked = False
    with caplog.at_level(logging.INFO), Exporter().serve(tmp_path / "prometheus", "node-0", {}):
        worked = True
    assert worked
    (line,) = caplog.messages
    assert "node-0" in line
    assert "pip install prometheus-client" in line
    assert not (tmp_path / "prometheus").exists()


def test_where_no_file_can_be_written_a_line_says_so_and_the_work_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prometheus").write_text("a file where the folder should be")
    worked = False
    with Exporter().serve(tmp_path / "prometheus", "node-0", {}):
        worked = True
    assert worked
    assert str(tmp_path / "prometheus") in caplog.text


def test_bytes_are_told_apart_by_the_service_at_the_end_of_the_link(served: tuple[Exporter, str]) -> None:
    class End:
        bytes_sent, bytes_received = 10, 20

    exporter, address = served
    exporter.publish(link_reading({"buffer": End(), "store": End()}))
    samples = scrape(address)
    assert samples['async_rl_link_sent_bytes_total{link="buffer"}'] == 10
    assert samples['async_rl_link_received_bytes_total{link="store"}'] == 20


def test_a_dry_run_says_where_the_numbers_go() -> None:
    run = RunConfig(trackers=("wandb", "tensorboard", "wandb"))
    console = Console(file=io.StringIO(), width=200)
    console.print(dry_run_table(Config(run=run, task={"kind": "digit_sort"}, model=ModelConfig(path="m")), "m"))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("metrics")]
    assert line.endswith("DIR/prometheus/*.json), wandb, tensorboard")


# --- real processes --------------------------------------------------------------------------------------------------

POOL = """
from async_rl.run import exporter
from async_rl.run.exporter import Metric
from async_rl.run.process import pool_main
import time

exporter.LOCK_TIMEOUT_S = 60.0  # whoever holds it may get no processor

def body(context):
    context.stopping.is_set()  # from here on it ends by itself
    (context.directory.path / "up").touch()
    while not context.stopping.wait(0.02):
        context.exporter.offer(time.monotonic(), lambda: {Metric("gauge", "async_rl_test_up", "Up."): 1})

pool_main(__file__, body)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., tuple[RunDirectory, Callable[[str], subprocess.Popen[bytes]]]]]:
    package = tmp_path / "path" / "fakepool"
    package.mkdir(parents=True)
    (package / "loop.py").write_text(textwrap.dedent(POOL))
    made: list[RunDirectory] = []
    started: list[subprocess.Popen[bytes]] = []
    environment = {**child_environment(), "PYTHONPATH": str(tmp_path / "path")}
    del environment["ASYNC_RL_PARENT_DEATH"]

    def make(prometheus: bool = True) -> tuple[RunDirectory, Callable[[str], subprocess.Popen[bytes]]]:
        config = Config(
            run=RunConfig(prometheus=prometheus), task={"kind": "digit_sort"}, model=ModelConfig(path=str(tmp_path))
        )
        directory = RunDirectory.create(tmp_path / "run", config)
        made.append(directory)

        def start(name: str) -> subprocess.Popen[bytes]:
            arguments = ["--config", str(directory.config_path), "--dir", str(directory.path), "--name", name]
            process = subprocess.Popen([sys.executable, "-P", "-m", "fakepool.loop", *arguments], env=environment)
            started.append(process)
            return process

        return directory, start

    yield make
    for process in started:
        process.kill()
        process.wait()
    for directory in made:
        directory.remove_sockets()


@pytest.mark.timeout(240)
def test_a_killed_process_leaves_a_file_that_the_next_one_of_the_run_takes_away(pool) -> None:
    directory, start = pool()
    folder = directory.path / "prometheus"
    killed, living = start("node-0"), start("node-1")
    eventually(lambda: set(targets(folder)) == {"node-0", "node-1"}, (OSError,))
    first = targets(folder)
    assert first["node-0"] | {"address": ""} == {"run": "run", "pool": "fakepool", "process": "node-0", "address": ""}
    eventually(lambda: scrape(first["node-0"]["address"]).get("async_rl_test_up") == 1, (OSError,))
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert set(targets(folder)) == {"node-0", "node-1"}
    with pytest.raises(urllib.error.URLError):
        scrape(first["node-0"]["address"])
    start("node-2")
    eventually(lambda: set(targets(folder)) == {"node-1", "node-2"}, (OSError,))
    start("node-0")
    eventually(lambda: set(targets(folder)) == {"node-0", "node-1", "node-2"}, (OSError,))
    assert scrape(targets(folder)["node-0"]["address"])["process_open_fds"] > 0
    eventually(lambda: scrape(first["node-1"]["address"]).get("async_rl_test_up") == 1, (OSError,))  # it watches
    living.terminate()
    assert living.wait(60) == 0
    assert set(targets(folder)) == {"node-0", "node-2"}


@pytest.mark.timeout(240)
def test_a_config_without_prometheus_opens_no_port(pool) -> None:
    directory, start = pool(prometheus=False)
    process = start("node-0")
    eventually((directory.path / "up").exists, ())
    process.terminate()
    assert process.wait(60) == 0
    assert not (directory.path / "prometheus").exists()


def test_a_request_that_drips_is_hung_up_on_in_the_end(
    served: tuple[Exporter, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "REQUEST_LIMIT_S", 0.5)
    host, _, port = served[1].rpartition(":")
    with socket.create_connection((host, int(port)), 60) as dripping:
        deadline = time.monotonic() + 60
        with suppress(OSError):  # what is sent after it was hung up on
            while time.monotonic() < deadline:
                dripping.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < deadline

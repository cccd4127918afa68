"""Hostile messages to real processes, while they work for honest peers.

A hundred thousand to each port (in the ordinary run some two thousand), of strangers and of a node that has the run's
token. No crash, no hang, no growth, nothing executed, every one counted, and the work goes on."""

from __future__ import annotations

import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from fake_work import FakeNode, FakeTrainer, Published, Service, finish, policy, receive, wait_for
from hostile import NOTHING, as_payload, insiders, strangers
from scraping import scrape, targets

from async_rl.wire import frames
from async_rl.wire.keys import make_keys
from async_rl.wire.messages import Chunk, Pull, Stored, Upload
from async_rl.wire.session import Report

MEGABYTE = 1 << 20
GROWTH_BYTES = 48 * MEGABYTE  # what a service may have more afterwards: honest work goes on meanwhile
REFUSED = "async_rl_link_refused_total"
OUTSIDE = "async_rl_buffer_outside_results_total"

both_sizes = pytest.mark.parametrize(
    "count",
    [
        pytest.param(2_000, marks=pytest.mark.timeout(600)),
        pytest.param(100_000, marks=[pytest.mark.faults, pytest.mark.timeout(1800)]),
    ],
)


class Attacked:
    """A service's process, and what it says of itself at /metrics."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self._name = name
        folder = service.directory.path / "prometheus"
        wait_for(lambda: name in targets(folder), "the service's metrics")
        self.metrics_address = targets(folder)[name]["address"]
        self.endpoint = service.directory.endpoint if name == "service" else service.directory.store_endpoint
        self.process = psutil.Process(service.process.pid)

    def counted(self, *families: str) -> dict[str, float]:
        """The newest counters, by kind; a reading is at most half a second old."""
        time.sleep(1.2)
        found = scrape(self.metrics_address)
        return {
            name.partition('"')[2].rstrip('"}'): value
            for name, value in found.items()
            if name.partition("{")[0] in families
        }

    @property
    def rss(self) -> int:
        return int(self.process.memory_info().rss)


@contextmanager
def stranger(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 120_000)  # what was sent arrives, or the context is long in ending
        dealer.setsockopt(zmq.SNDTIMEO, 30_000)
        dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        dealer.connect(endpoint)
        yield dealer


def flood(attacked: Attacked, messages: Iterator[list[bytes]], count: int) -> float:
    """Send so many, and stay until all are counted: who leaves with answers unread resets the connection, and what the
    service has not read of it by then is gone. Returns what the count should be."""
    due = sum(attacked.counted(REFUSED).values()) + count
    with stranger(attacked.endpoint) as dealer:
        for _ in range(count):
            dealer.send_multipart(next(messages))
            hear(dealer)
        wait_for(lambda: hear(dealer) or sum(attacked.counted(REFUSED).values()) >= due, "every message to be counted")
    return due


def hear(dealer: zmq.Socket[bytes]) -> None:
    """All answers that are there."""
    while dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        dealer.recv_multipart()


def strangers_cost_a_count_each(attacked: Attacked, names: list[str], trace: Path, count: int, seed: int) -> None:
    messages = strangers(attacked.service.directory.run_id, names, trace, random.Random(seed))
    flood(attacked, messages, 500)  # memory that is touched once is not growth
    rss = attacked.rss
    due = flood(attacked, messages, count)
    after = attacked.counted(REFUSED)
    assert sum(after.values()) == due, after
    assert {"undecodable", "unknown_peer", "wrong_token", "wrong_run", "wrong_schema"} <= after.keys()
    assert attacked.rss - rss < GROWTH_BYTES


class Insider:
    """Has the token, and says hello again under a new epoch whenever it was thrown out."""

    def __init__(self, attacked: Attacked) -> None:
        self._directory = attacked.service.directory
        self._endpoint = attacked.endpoint
        self._epoch = time.time_ns()
        self.refusals = 0

    def harm(self, said: Iterator[Any], count: int) -> None:
        left = count
        while left:
            with stranger(self._endpoint) as dealer:
                self._epoch += 1
                self._hello(dealer)
                left -= self._session(dealer, said, left)

    def _hello(self, dealer: zmq.Socket[bytes]) -> None:
        hello = frames.Hello("node", "mallory", self._directory.token, 0, 0, 1.0)
        dealer.send(frames.link_frame(self._directory.run_id, "mallory", self._epoch, Report(0, MEGABYTE), hello))
        while True:
            envelope = frames.read_envelope(dealer.recv(), 0)
            if envelope.seq == 0 and isinstance(frames.read_link_message(envelope), frames.Welcome):
                return

    def _session(self, dealer: zmq.Socket[bytes], said: Iterator[Any], most: int) -> int:
        """Until it is thrown out; says how many messages that took."""
        for seq in range(1, most + 1):
            payload = as_payload(next(said))
            report = Report(0, 1 << 40)
            dealer.send(frames.head_frame(self._directory.run_id, "mallory", self._epoch, seq, report, payload))
            while dealer.poll(20 if seq % 16 == 0 else 0):
                parts = dealer.recv_multipart()
                envelope = frames.read_envelope(parts[0], len(parts) - 1)
                if envelope.seq == 0 and isinstance(frames.read_link_message(envelope), frames.Refused):
                    self.refusals += 1
                    return seq
        return most


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """A file that is there when something was executed."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@contextmanager
def at_work(service: Service, name: str, once: Callable[[], None]) -> Iterator[list[int]]:
    """`once` over and over in a thread, until the end; what it raised is raised here."""
    done, errors, over = [0], [], threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                once()
                done[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=name)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not errors, errors


@both_sizes
def test_the_buffer_goes_on_working(tmp_path: Path, trace: Path, count: int) -> None:
    steps = 100_000
    with ExitStack() as closing:
        service = closing.enter_context(Service(tmp_path, run={"name": "faults", "steps": steps}))
        attacked = Attacked(service, "service")
        published = Published()
        nodes = [
            FakeNode(service.dial("node", name), name, published, seed, lambda rng: rng.randint(4, 24))
            for seed, name in enumerate(("node-0", "node-1"))
        ]
        trainer = FakeTrainer(service.dial("trainer", "trainer"), service.config, published, pause_s=0.05)
        for worker in (*nodes, trainer):
            worker.start()
        wait_for(lambda: trainer.steps_done >= 3, "the first steps")

        made = trainer.steps_done
        strangers_cost_a_count_each(attacked, ["node-0", "trainer", "mallory"], trace, count, seed=1)
        wait_for(lambda: trainer.steps_done > made, "steps during and after the flood of strangers")

        insider, said = Insider(attacked), insiders(trace, random.Random(2))
        insider.harm(said, 200)
        before, rss, made = attacked.counted(REFUSED, OUTSIDE), attacked.rss, trainer.steps_done
        insider.harm(said, count)
        assert insider.refusals > count / 100
        assert attacked.rss - rss < GROWTH_BYTES
        wait_for(lambda: trainer.steps_done > made, "steps during and after the harm of an insider")
        counted = attacked.counted(REFUSED, OUTSIDE)
        assert {"undecodable_body", "misplaced", "trouble"} <= counted.keys(), counted
        # Not every one: some are held until it joins, or end its session.
        assert sum(counted.values()) - sum(before.values()) > count / 2, (before, counted)

        trainer.ending = True
        trainer.join(60)
        tool = service.dial("tool", "tool")
        ledger = service.status(tool).ledger
        assert ledger["issued"] == sum(ledger.values()) - ledger["issued"]
        assert ledger["trained"] == len(trainer.trained)
        delivered = {key: data for node in nodes for key, data in node.delivered.items()}
        assert all(delivered[key] == data for key, data in trainer.trained)
        tool.close(0.5)
        assert service.process.poll() is None
        finish(trainer, *nodes)
        assert service.log.stat().st_size < 4 * MEGABYTE
        assert service.directory.token not in service.log.read_text()


@both_sizes
def test_the_policy_store_goes_on_serving(tmp_path: Path, trace: Path, count: int) -> None:
    with ExitStack() as closing:
        service = closing.enter_context(Service(tmp_path, "buffer.store"))
        attacked = Attacked(service, "store")
        trainer = service.dial("trainer", "trainer", attacked.endpoint)
        node = service.dial("node", "node-0", attacked.endpoint)
        data = random.Random(3).randbytes(MEGABYTE)
        trainer.send(Upload(policy(1), "lora", len(data), hashlib.sha256(data).hexdigest()), [data])
        assert receive(trainer, Stored).message.policy == policy(1)

        def pull() -> None:
            node.send(Pull(policy(1), 0, MEGABYTE))
            assert bytes(receive(node, Chunk).blobs[0]) == data
            time.sleep(0.02)

        with at_work(service, "pulls", pull) as done:
            strangers_cost_a_count_each(attacked, ["node-0", "trainer"], trace, count, seed=4)
            pulled = done[0]
            assert pulled > 0
            insider, said = Insider(attacked), insiders(trace, random.Random(5))
            insider.harm(said, 200)
            rss = attacked.rss
            insider.harm(said, count)
            assert attacked.rss - rss < GROWTH_BYTES
            wait_for(lambda: done[0] > pulled, "pulls after the harm of an insider")
        counted = attacked.counted(REFUSED)
        assert {"undecodable_body", "misplaced"} <= counted.keys(), counted
        for link in (node, trainer):
            link.close(0.5)
        assert service.process.poll() is None
        assert len(list((service.directory.adapters / "store").glob("*.policy"))) == 1
        assert service.log.stat().st_size < 4 * MEGABYTE


@both_sizes
def test_raw_bytes_at_every_port_are_hung_up_on(tmp_path: Path, trace: Path, count: int) -> None:
    """What is not even ZeroMQ, or HTTP: one connection for twenty messages of the other tests."""
    rng = random.Random(6)
    with Service(tmp_path) as service:
        attacked = Attacked(service, "service")
        tool = service.dial("tool", "tool")  # it listens
        rss = attacked.rss
        for address in (attacked.endpoint.removeprefix("tcp://"), attacked.metrics_address):
            host, _, port = address.rpartition(":")
            said = 0
            for number in range(count // 20):  # each a connection of its own
                # Where the kernel finds no room for one more, it lets the caller try again after a second, then three.
                with suppress(OSError), socket.create_connection((host, int(port)), 0.2) as raw:
                    raw.settimeout(30)
                    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
                    huge = greeting + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
                    raw.sendall(
                        [
                            rng.randbytes(rng.randrange(1, 2000)),
                            b"GET /metrics HTTP/1.1\r\nX: " + b"y" * rng.randrange(100_000),
                            b"POST /" + b"../" * 50 + b"etc/passwd HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n",
                            huge + b"\x02" + (1 << 62).to_bytes(8, "big") + b"x",  # a frame of four exabytes
                        ][number % 4]
                    )
                    said += 1
            assert said > count // 80, f"{said} said at {address}"
        assert service.status(tool).trainer == ""
        tool.close(0.5)

        def scraped() -> bool:
            with suppress(OSError):
                return bool(scrape(attacked.metrics_address))
            return False

        wait_for(scraped, "the metrics, once slow requests were given up")
        assert attacked.rss - rss < GROWTH_BYTES
        assert service.process.poll() is None


@pytest.mark.timeout(600)
def test_with_keys_no_stranger_gets_as_far_as_a_message(tmp_path: Path, trace: Path) -> None:
    make_keys(tmp_path / "keys")
    buffer = {
        "endpoint": "tcp://127.0.0.1:*", "store_endpoint": "tcp://127.0.0.1:*", "groups_per_step": 4, "group_size": 4,
        "heartbeat": 0.3, "keys": str(tmp_path / "keys"),
    }  # fmt: skip
    with Service(tmp_path, buffer=buffer) as service:
        attacked = Attacked(service, "service")
        tool = service.dial("tool", "tool")
        server = (tmp_path / "keys" / "service.public").read_text().split()[1].encode()
        messages = strangers(service.directory.run_id, ["tool"], trace, random.Random(7))
        with ExitStack() as closing:
            context = closing.enter_context(zmq.Context())
            for number in range(300):  # without keys, for another service, or with a key that is not listed
                dealer = closing.enter_context(context.socket(zmq.DEALER))
                dealer.setsockopt(zmq.LINGER, 0)
                public, secret = zmq.curve_keypair()
                if number % 3:
                    dealer.setsockopt(zmq.CURVE_SERVERKEY, server if number % 3 == 1 else public)
                    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
                    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
                dealer.connect(attacked.endpoint)
                with suppress(zmq.Again):  # one that is turned away at once has no way to say more
                    for _ in range(10):
                        dealer.send_multipart(next(messages), zmq.NOBLOCK)

            def all_refused() -> bool:
                counted = attacked.counted(REFUSED)
                return counted.get("unknown_key", 0) >= 100 and counted.get("no_handshake", 0) >= 200

            wait_for(all_refused, "all to be refused")
        assert set(attacked.counted(REFUSED)) == {"unknown_key", "no_handshake"}
        assert service.status(tool).trainer == ""
        tool.close(0.5)


def test_nothing_is_said_by_this_test_that_would_be_let_in() -> None:
    """Else it would show nothing: no message of a stranger is a hello with a token that could be right."""
    tokens = set()
    messages = strangers("run", ["n"], Path("/nowhere"), random.Random(8))
    for _ in range(3000):
        with suppress(frames.BadFrame):
            hello = frames.read_link_message(frames.read_envelope(next(messages)[0], 0))
            if isinstance(hello, frames.Hello):
                tokens.add(hello.token)
    assert {"", "guess", "0" * 64} <= tokens
    assert frames.read_envelope(frames.link_frame("run", "n", 1, NOTHING, frames.Ping()), 0).run == "run"

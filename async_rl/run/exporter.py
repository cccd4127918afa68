"""What a process tells Prometheus: /metrics on loopback, and a file by which a Prometheus on this machine finds it.

The loop of a process hands over a whole reading of its numbers, at most a few times a second (`Exporter.offer`); a
thread renders the newest reading when it is asked. So a scrape never looks into a state machine, and what belongs
together (the ledger) is of one moment.

The file, DIR/prometheus/<process>.json in Prometheus' file_sd format, is written once the port listens and taken away
before it closes. A killed process leaves its file behind: until the next process of the run starts, which takes away
every file whose port nobody listens at, a Prometheus shows that target as down.

Numbers only: no token, no text of a sample, nothing that a user of this machine may not see.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

log = logging.getLogger("async_rl.exporter")

HOST = "127.0.0.1"
READ_EVERY_S = 0.5  # how often a loop is asked for a reading
REQUEST_TIMEOUT_S = 5.0  # for each read and write of a request, so that no connection holds a thread for long
REQUEST_LIMIT_S = 15.0  # for a whole request
MAX_REQUESTS = 8  # at once; what comes on top is hung up on
WAKE_S = 0.1  # how often the server looks whether it is to end
LOCK_TIMEOUT_S = 5.0  # another process writes one small file meanwhile
LOCK_LOOK_S = 0.01
LISTENING_TIMEOUT_S = 0.5  # to find out whether anyone listens at a port of this machine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds of histograms of durations, from a push over loopback to a long step."""

Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """A name in Prometheus' conventions: async_rl_<process>_<what>_<base unit>, counters with _total. `label` is the
    one label by which a reading tells several values apart; empty: there is one value."""

    kind: Kind
    name: str
    help: str
    label: str = ""


class Counted(NamedTuple):
    """A histogram's state: values at or below each bound (cumulative, the last bound is "+Inf"), and their sum."""

    buckets: tuple[tuple[str, float], ...]
    total: float


class Histogram:
    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Counted:
        names = (*map(str, self._bounds), "+Inf")
        sums = (float(sum(self._counts[: index + 1])) for index in range(len(names)))
        return Counted(tuple(zip(names, sums, strict=True)), self._total)


Reading = Mapping[Metric, "float | Mapping[str, float] | Counted | None"]
"""The numbers of one moment, never changed once handed over. None: there is no such number yet."""


class Exporter:
    """A process has one. Until `serve`, nothing is due and an offer costs one comparison."""

    def __init__(self) -> None:
        self._reading: Reading = {}
        self._due = math.inf

    def offer(self, now: float, read: Callable[[], Reading]) -> None:
        """Called by the loop as often as it likes, with the monotonic clock; `read` is called when a reading is due."""
        if now >= self._due:
            self._due = now + READ_EVERY_S
            self.publish(read())

    def publish(self, reading: Reading) -> None:
        """At once: for a loop that has news seldom."""
        self._reading = reading

    def collect(self) -> Iterator[Family]:
        """The newest reading, as prometheus_client wants it; called by the server's threads."""
        for metric, value in self._reading.items():
            if value is not None:
                yield _family(metric, value)

    @contextmanager
    def serve(self, folder: Path, process: str, labels: Mapping[str, str]) -> Iterator[None]:
        """Be there to be scraped. What cannot be done for want of a package, a port or a folder is logged: no run
        fails for it."""
        server = _start(self, process)
        if server is None:
            yield
            return
        file = folder / f"{process}.json"
        try:
            self._due = 0.0
            _announce(file, f"{HOST}:{server.server_port}", {**labels, "process": process})
            yield
        finally:
            self._due = math.inf
            with suppress(OSError):
                file.unlink()
            server.shutdown()
            server.server_close()


# --- what every process has ------------------------------------------------------------------------------------------


class Link(Protocol):
    """An end of a link: a client or a server."""

    bytes_sent: int
    bytes_received: int


SENT = Metric("counter", "async_rl_link_sent_bytes_total", "Bytes that left, by the service at the link's end.", "link")
RECEIVED = Metric("counter", "async_rl_link_received_bytes_total", "Bytes that came, by the same.", "link")


def link_reading(links: Mapping[str, Link]) -> Reading:
    """`links` by the service that they lead to, or that listens: "buffer", "store"."""
    return {
        SENT: {name: link.bytes_sent for name, link in links.items()},
        RECEIVED: {name: link.bytes_received for name, link in links.items()},
    }


# --- rendering and serving -------------------------------------------------------------------------------------------


def _family(metric: Metric, value: float | Mapping[str, float] | Counted) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if isinstance(value, Counted):
        return HistogramMetricFamily(metric.name, metric.help, value.buckets, value.total)
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    if not isinstance(value, Mapping):
        return kind(metric.name, metric.help, value)
    family = kind(metric.name, metric.help, labels=[metric.label])
    for name, number in value.items():
        family.add_metric([name], number)
    return family


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per request and a bound on both: other users of this machine can reach the port."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_REQUESTS

    def __init__(self, address: tuple[str, int], handler: type[BaseRequestHandler]) -> None:
        self._room = threading.Semaphore(MAX_REQUESTS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask the name service for a name that nobody needs
        self.server_name, self.server_port = HOST, self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # Whoever sends a byte now and then would keep each single read alive, and its thread for hours.
        limit = threading.Timer(REQUEST_LIMIT_S, _hang_up, (request,))
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics failed", exc_info=True)  # whoever asked has left, or was too slow


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):  # it is over already
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _start(exporter: Exporter, process: str) -> _Server | None:
    """The server, in a thread of its own; None, and a line in the log, when there can be none."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        server = _Server((HOST, 0), _Handler)
    except ImportError as error:
        log.warning("no metrics for Prometheus from %s: %s: pip install prometheus-client", process, error)
        return None
    except OSError as error:
        log.warning("no metrics for Prometheus from %s: cannot listen on %s: %s", process, HOST, error)
        return None
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(exporter)
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, args=(WAKE_S,), name="prometheus", daemon=True).start()
    log.debug("metrics at http://%s:%d/metrics", HOST, server.server_port)
    return server


# --- the files by which it is found ----------------------------------------------------------------------------------


def _announce(file: Path, target: str, labels: Mapping[str, str]) -> None:
    """Write a target's file, and take away those of processes that are gone."""
    try:
        file.parent.mkdir(exist_ok=True)
        with _alone_in(file.parent):
            for other in file.parent.glob("*.json"):
                if other != file and not _is_listened_at(_targets(other)):
                    other.unlink(missing_ok=True)
            partial = file.with_name(f".{file.name}.part")
            partial.write_text(json.dumps([{"targets": [target], "labels": dict(labels)}]) + "\n", encoding="utf-8")
            partial.replace(file)
    except OSError as error:
        log.warning("no file for Prometheus to find %s by: %s: %s", target, error.filename or file, error.strerror)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """So that no process takes away the file that another one has just written anew."""
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process has held it for {LOCK_TIMEOUT_S:g} s", str(folder)
                )
            time.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _targets(file: Path) -> list[str]:
    try:
        return [str(target) for group in json.loads(file.read_text()) for target in group["targets"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _is_listened_at(targets: Iterable[str]) -> bool:
    for target in targets:
        host, _, port = target.rpartition(":")
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), LISTENING_TIMEOUT_S):
            return True
    return False

"""The status feed against a real server: started before it, through its end, and after a new one came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from async_rl.config import Config, ModelConfig, RunConfig
from async_rl.run.directory import RunDirectory
from async_rl.run.metrics import MetricsWriter
from async_rl.run.view import RunView
from async_rl.version import PolicyId
from async_rl.wire.link import Received, Server
from async_rl.wire.messages import NodeStatus, Status, StatusRequest


def status(uptime: float) -> Status:
    node = NodeStatus("node-0", "ready", "torch", 4, PolicyId("main", 1, "ab" * 32), 0, 0.5, int(100 * uptime))
    return Status(uptime, (node,), "ready", None, 1, 3, {"issued": 0}, {}, {}, 0, 0, 0, "nobody waits", (), 4)


class Buffer:
    """Answers status requests, as the buffer does, on a clock of its own that goes a second per answer."""

    def __init__(self, directory: RunDirectory) -> None:
        self._server = Server(directory.endpoint, run=directory.run_id, token=directory.token, name="buffer")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        uptime = 0.0
        while not self._over.is_set():
            for event in self._server.poll(0.05):
                if isinstance(event, Received) and isinstance(event.message, StatusRequest):
                    uptime += 1.0
                    self._server.send(event.peer, status(uptime))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_a_view_shows_the_metrics_and_the_status_of_a_buffer_that_comes_later(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="x", steps=3), task={"kind": "digit_sort"}, model=ModelConfig(path="m"))
    directory = RunDirectory.create(tmp_path / "run", config)
    view = RunView(directory, config)
    buffer = None
    try:
        assert view.snapshot().status is None
        with MetricsWriter(directory.metrics_path) as writer:
            writer.write({"step": 0, "version": 1, "reward": 0.5, "eval": {"version": 0, "reward": 0.25, "n": 4}})
        assert (view.snapshot().done, len(view.snapshot().evals)) == (1, 1)
        buffer = Buffer(directory)
        wait_for(lambda: view.snapshot().rollout_rate is not None)
        snapshot = view.snapshot()
        assert snapshot.status is not None
        assert snapshot.status.waiting == "nobody waits"
        assert snapshot.rollout_rate == 100.0
    finally:
        view.close()
        if buffer:
            buffer.close()
        directory.remove_sockets()

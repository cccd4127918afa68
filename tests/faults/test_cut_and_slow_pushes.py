"""A policy on its way to a node: cut in the middle it arrives all the same, and who is slow or dead delays nobody else.

The store is a process, the pullers are the nodes' own."""

from __future__ import annotations

import hashlib
import queue
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_work import PATIENCE_S, Service, policy
from tcp_proxy import TcpProxy

from async_rl.wire.link import Client
from async_rl.wire.messages import Stored, Upload
from inference import pulls
from inference.policies import PolicyFetched, PolicyPuller

SIZE = 8 << 20


class Nodes:
    """A store, a trainer that uploads to it, and pullers."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder = folder
        self._closing = closing
        self.store = closing.enter_context(Service(folder, "buffer.store"))
        self.endpoint = self.store.directory.store_endpoint
        self._trainer = self._dial("trainer", "trainer", self.endpoint)

    def proxy(self) -> TcpProxy:
        return self._closing.enter_context(TcpProxy(self.endpoint))

    def puller(self, name: str, endpoint: str = "") -> queue.SimpleQueue[object]:
        """What a node would hear of its policies."""
        inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        scratch = self._folder / name
        scratch.mkdir()
        puller = PolicyPuller(self._dial("node", name, endpoint or self.endpoint), scratch, inbox)
        self._closing.callback(puller.close)
        return inbox

    def upload(self, version: int, size: int = SIZE) -> tuple[bytes, float]:
        """The policy's bytes, and in how many seconds it was stored and announced."""
        data = random.Random(version).randbytes(size)
        started = time.monotonic()
        self._trainer.send(Upload(policy(version), "lora", size, hashlib.sha256(data).hexdigest()), [data])
        while self._trainer.receive(PATIENCE_S, "its upload").message != Stored(policy(version)):
            pass
        return data, time.monotonic() - started

    def _dial(self, role: str, name: str, endpoint: str) -> Client:
        link = self.store.dial(role, name, endpoint)  # type: ignore[arg-type]
        self._closing.callback(link.close, 0.2)
        return link


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as closing:
        yield Nodes(tmp_path, closing)


def fetched(inbox: queue.SimpleQueue[object], version: int) -> PolicyFetched:
    item = inbox.get(timeout=PATIENCE_S)
    assert isinstance(item, PolicyFetched), item
    assert item.policy == policy(version)
    return item


def test_a_push_that_is_cut_in_the_middle_arrives_whole(nodes: Nodes) -> None:
    proxy = nodes.proxy()
    inbox = nodes.puller("node", proxy.endpoint)
    connections = proxy.accepted
    proxy.cut_after = proxy.passed_back + SIZE // 2
    data, _ = nodes.upload(0)
    assert fetched(inbox, 0).path.read_bytes() == data
    assert proxy.cut_after is None, "it was not cut"
    assert proxy.accepted > connections


def test_a_push_that_is_cut_again_and_again_arrives_whole(nodes: Nodes) -> None:
    proxy = nodes.proxy()
    inbox = nodes.puller("node", proxy.endpoint)
    for version in range(3):
        proxy.cut_after = proxy.passed_back + SIZE // (version + 2)
        data, _ = nodes.upload(version)
        assert fetched(inbox, version).path.read_bytes() == data
    assert proxy.accepted >= 4


def test_a_store_that_falls_silent_in_the_middle_of_a_push_ends_the_node_with_its_name(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "CHUNK_TIMEOUT_S", 2.0)
    proxy = nodes.proxy()
    inbox = nodes.puller("node-3", proxy.endpoint)
    proxy.bytes_per_s = SIZE // 2
    nodes.upload(0)
    time.sleep(0.5)
    proxy.silent = True
    error = inbox.get(timeout=PATIENCE_S)
    assert "node-3 waited 2 s for bytes of policy" in str(error)
    assert proxy.endpoint in str(error)


def test_a_slow_and_a_dead_node_delay_no_push_to_the_others(nodes: Nodes) -> None:
    """Measured: the time from the upload's begin to its arrival at a sound node, alone and in bad company."""
    sound = nodes.puller("sound")

    def push_s(version: int) -> float:
        started = time.monotonic()
        data, _ = nodes.upload(version)
        got = fetched(sound, version)
        taken = time.monotonic() - started
        assert got.path.read_bytes() == data
        got.path.unlink()
        return taken

    push_s(0)
    alone = [push_s(version) for version in range(1, 8)]
    slow, dead = nodes.proxy(), nodes.proxy()
    slow_inbox = nodes.puller("slow", slow.endpoint)
    nodes.puller("dead", dead.endpoint)
    fetched(slow_inbox, 7)
    slow.bytes_per_s = SIZE // 4  # four seconds a push
    dead.silent = True
    in_company = [push_s(version) for version in range(8, 15)]
    print(f"median push: alone {statistics.median(alone):.3f} s, in company {statistics.median(in_company):.3f} s")
    # The fastest: a busy machine makes some slow, a store that waits for the slow one all.
    assert min(in_company) < 3 * min(alone) + 0.2
    assert statistics.median(in_company) < 4.0, "as slow as the slow one"

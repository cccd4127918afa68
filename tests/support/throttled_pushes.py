"""Pushes to many receiver processes, every connection behind a TCP proxy of its own that is as slow as a network.

Run as a process, since receivers are forked before there are threads: `throttled_pushes.py RECEIVERS PUSHES [MB/S]`
prints a JSON object: milliseconds to each receiver's verified file of every push, to one receiver and to all; the bytes
that left the store for each; and of a push in which a relay was killed in the middle. The upload is not throttled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tcp_proxy import TcpProxy

from async_rl.wire.link import Client
from async_rl.wire.messages import StatusRequest, StoreStatus
from inference.bench_push_arms import PushHouse
from inference.bench_push_processes import cpu_seconds
from inference.bench_push_receiver import PATIENCE_S, Join, Leave, Taken

SIZE = 16_000_000
FANOUT, TIMEOUT_S = 3, 3.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ThrottledHouse(PushHouse):
    """Receivers that relay, each reachable through its own proxy, and the store through another."""

    def __init__(self, receivers: int, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        super().__init__(
            [SIZE], receivers, store_endpoint="tcp://127.0.0.1:*", relay_fanout=FANOUT, relay_timeout=TIMEOUT_S
        )
        self.relays: list[TcpProxy] = []

    @contextmanager
    def pushes(self, count: int) -> Iterator[Any]:
        """What it yields pushes once, and returns (started, stored)."""
        with ExitStack() as closing:
            self.door = closing.enter_context(self.throttled(self._run.store_endpoint))
            ports = [free_port() for _ in range(count)]
            self.relays = [closing.enter_context(self.throttled(f"tcp://127.0.0.1:{port}")) for port in ports]
            joins = [
                Join(
                    self.door.endpoint, self._run.run_id, self._run.token, relay_endpoint=f"tcp://127.0.0.1:{port}",
                    relay_address=proxy.endpoint, relay_timeout_s=TIMEOUT_S,
                )
                for port, proxy in zip(ports, self.relays, strict=True)
            ]  # fmt: skip
            link = closing.enter_context(self.trainer())
            self.receivers.order_each(joins)
            time.sleep(1.0)  # all have introduced themselves
            yield lambda: self._send_to_store("relay", link, self._adapters[SIZE], count)
            if all(is_alive(pid) for pid in self.receivers.pids):
                self.receivers.order(count, Leave())

    @contextmanager
    def trainer(self) -> Iterator[Client]:
        link = self.link("trainer", "trainer")
        yield link
        link.close()

    def link(self, role: Any, name: str) -> Client:
        link = Client(
            self._run.store_endpoint, run=self._run.run_id, token=self._run.token, role=role, name=name, peer="store"
        )
        link.connect(PATIENCE_S)
        return link

    def status(self) -> StoreStatus:
        link = self.link("tool", "status")
        link.send(StatusRequest())
        status: StoreStatus = link.receive(PATIENCE_S, "the store's status").message
        link.close()
        return status

    def measure_each(self, count: int, pushes: int) -> dict[str, Any]:
        """After one push that is not counted."""
        verified: list[list[float]] = []
        with self.pushes(count) as push:
            for number in range(pushes + 1):
                if number == 1:
                    before, passed, spent = self.status(), self.door.passed_back, self.spent(count)
                started, stored = push()
                self._taken(started, stored, count)
                if number:
                    verified.append([(each.verified - started) * 1e3 for each in self.taken])
            after = self.status()
            size = self.adapter_bytes(SIZE) * pushes
            return {
                "verified_ms": verified,
                "stores_copies": (after.served_bytes - before.served_bytes) / size,
                "stores_copies_on_the_wire": (self.door.passed_back - passed) / size,
                "relayed_copies": (after.relayed_bytes - before.relayed_bytes) / size,
                "bypasses": after.bypasses,
                "node_cpu_s": (self.spent(count) - spent) / count / pushes,
            }

    def throttled(self, endpoint: str) -> TcpProxy:
        proxy = TcpProxy(endpoint)
        proxy.bytes_per_s = self._bytes_per_s
        return proxy

    def spent(self, count: int) -> float:
        return sum(map(cpu_seconds, self.receivers.pids[:count]))

    def kill_one(self, count: int) -> dict[str, Any]:
        """Push once, then once more, and kill -9 the relay that sends the most when half has gone through it."""
        with self.pushes(count) as push:
            started, stored = push()
            self._taken(started, stored, count)
            before = [proxy.passed_back for proxy in self.relays]
            bypassed = sum(self.status().bypasses.values())
            started, _ = push()
            victim = self.busiest(before)
            killed_ms = (time.monotonic() - started) * 1e3
            os.kill(self.receivers.pids[victim], signal.SIGKILL)
            children = self.relays[victim].passed_back - before[victim]
            taken = self.receivers.answers(count, Taken, "a push to arrive", without=[victim])
            return {
                "verified_ms": [(each.verified - started) * 1e3 for each in taken],
                "killed_ms": killed_ms,
                "sent_by_then": children,
                "bypasses": sum(self.status().bypasses.values()) - bypassed,
                "by_reason": self.status().bypasses,
            }

    def busiest(self, before: list[int]) -> int:
        """The relay that has sent half of a file to each of at least two."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            sent = [proxy.passed_back - was for proxy, was in zip(self.relays, before, strict=True)]
            if max(sent) >= self.adapter_bytes(SIZE):
                return sent.index(max(sent))
            time.sleep(0.01)
        raise TimeoutError("no relay sent anything")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def main(receivers: int, pushes: int, megabytes_per_s: int = 8) -> None:
    import torch

    torch.set_num_threads(1)
    with ThrottledHouse(receivers, megabytes_per_s * 1_000_000) as house:
        report = {"bytes": house.adapter_bytes(SIZE), "one": house.measure_each(1, pushes)}
        report["all"] = house.measure_each(receivers, pushes)
        report["killed"] = house.kill_one(receivers)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))

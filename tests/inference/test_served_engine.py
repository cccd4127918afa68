"""An engine over a server, the server being a simulated one in this process: what depends on time and on its load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from simulated_server import SimulatedServer

from inference.engine import Completion
from inference.served_engine import ServedEngine
from inference.server import Call, Piece, Signals

SLOTS = 16


class BusyServer(SimulatedServer):
    """Of the calls that it runs `room` get tokens; it queues the others, and says so, and that it preempts, while more
    are queued than it has `patience` for."""

    def __init__(self) -> None:
        super().__init__()
        self.room, self.patience, self.preempted, self.most = SLOTS, SLOTS, 0, 0
        self.first_s = self.token_s  # before its first token

    async def generate(self, call: Call) -> AsyncIterator[Piece]:
        self.calls[call.name] = call
        self.most = max(self.most, len(self.calls))
        for index in range(call.most):
            await asyncio.sleep(self.token_s if index else self.first_s)
            while list(self.calls).index(call.name) >= self.room:
                await asyncio.sleep(self.token_s)
            last = index + 1 == call.most
            if last:
                del self.calls[call.name]
            yield Piece([1], [-1.0], finish="length" if last else None)

    async def signals(self) -> Signals:
        queued = max(0, len(self.calls) - self.room)
        self.preempted += max(0, queued - self.patience)
        running = min(len(self.calls), self.room)
        return Signals(running / self.room if queued else 0.5, running, queued, self.preempted)


@pytest.fixture
def make(qwen: Any) -> Iterator[Callable[..., tuple[ServedEngine, BusyServer]]]:
    made: list[ServedEngine] = []

    def make(**options: Any) -> tuple[ServedEngine, BusyServer]:
        server = BusyServer()
        options = {"slots": SLOTS, "max_context": 48, "max_resident": 3, "stop_tokens": ()} | options
        engine = ServedEngine(server, qwen.path, **options)  # type: ignore[arg-type]
        made.append(engine)
        for version in (0, 1):
            engine.install(*qwen.policy(version))
        engine.flip(qwen.policy(0)[0], "finish")
        return engine, server

    yield make
    for engine in made:
        engine.close()


def run(
    engine: ServedEngine,
    qwen: Any,
    seconds: float,
    first: int = 0,
    ahead: int = 2 * SLOTS,
    until: Callable[[], bool] = lambda: True,
) -> list[Completion]:
    """Kept full for so long, and on a machine that is slow until `until` holds: at most a minute."""
    done: list[Completion] = []
    began, sample = time.monotonic(), first
    while time.monotonic() < began + seconds or not until():
        assert time.monotonic() < began + 60, "it never held"
        while engine.active < ahead:
            engine.submit(qwen.request(sample, new=8))
            sample += 1
        done += engine.step()
    return done


def test_an_engine_that_had_nothing_to_do_for_long_is_not_dead_when_it_has(make, qwen):
    engine, server = make(stall_timeout_s=30.0)
    server.first_s = 0.1
    for first in (0, 1000):
        engine._calls._last_news -= 1000.0  # as if it had had nothing to do for so long
        for sample in range(first, first + 2 * SLOTS):
            engine.submit(qwen.request(sample, new=8))
        while engine.active:
            engine.step()


@pytest.mark.timeout(400)
def test_fewer_requests_are_in_flight_while_the_server_preempts_and_more_when_it_has_room_again(make, qwen):
    engine, server = make()
    run(engine, qwen, 1.0, until=lambda: server.most == SLOTS)
    assert (engine.limit, server.most) == (SLOTS, SLOTS)
    server.room, server.patience = 5, 2
    run(engine, qwen, 3.0, first=1000, until=lambda: engine.limit <= 8 and len(server.calls) <= 8)
    low = engine.limit
    assert low <= 8
    server.most = 0
    run(engine, qwen, 0.5, first=3000)
    assert server.most <= 8
    server.room = SLOTS
    run(engine, qwen, 8.0, first=5000, until=lambda: engine.limit > 1.5 * low and engine.free_slots == 0)
    assert engine.limit > 1.5 * low
    assert engine.free_slots == 0


def test_it_says_when_the_first_token_came_under_a_policy(make, qwen):
    engine, _ = make()
    (old, _), (new, _) = qwen.policy(0), qwen.policy(1)
    assert engine.first_token(old) is None
    before = time.monotonic()
    run(engine, qwen, 0.2, until=lambda: engine.first_token(old) is not None)
    first = engine.first_token(old)
    assert before < first < time.monotonic()
    engine.flip(new, "finish")
    flipped = time.monotonic()
    run(engine, qwen, 0.5, first=1000, until=lambda: engine.first_token(new) is not None)
    assert flipped < engine.first_token(new) < time.monotonic()
    assert engine.first_token(old) == first

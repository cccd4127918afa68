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


def run(engine: ServedEngine, qwen: Any, seconds: float, first: int = 0, ahead: int = 2 * SLOTS) -> list[Completion]:
    """Kept full for so long."""
    done: list[Completion] = []
    until, sample = time.monotonic() + seconds, first
    while time.monotonic() < until:
        while engine.active < ahead:
            engine.submit(qwen.request(sample, new=8))
            sample += 1
        done += engine.step()
    return done


@pytest.mark.timeout(30)
def test_an_engine_that_had_nothing_to_do_for_long_is_not_dead_when_it_has(make, qwen):
    engine, server = make(stall_timeout_s=0.3)
    server.first_s = 0.1
    time.sleep(0.5)
    assert run(engine, qwen, 0.3)
    while engine.active:
        engine.step()
    time.sleep(0.5)
    assert run(engine, qwen, 0.3, first=1000)


@pytest.mark.timeout(60)
def test_fewer_requests_are_in_flight_while_the_server_preempts_and_more_when_it_has_room_again(make, qwen):
    engine, server = make()
    run(engine, qwen, 1.0)
    assert (engine.limit, server.most) == (SLOTS, SLOTS)
    server.room, server.patience = 5, 2
    run(engine, qwen, 3.0, first=1000)
    low = engine.limit
    assert low <= 8
    server.most = 0
    run(engine, qwen, 0.5, first=3000)
    assert server.most <= 8
    server.room = SLOTS
    run(engine, qwen, 8.0, first=5000)
    assert engine.limit > 1.5 * low
    assert engine.free_slots == 0


@pytest.mark.timeout(30)
def test_it_says_when_the_first_token_came_under_a_policy(make, qwen):
    engine, _ = make()
    (old, _), (new, _) = qwen.policy(0), qwen.policy(1)
    assert engine.first_token(old) is None
    before = time.monotonic()
    run(engine, qwen, 0.2)
    first = engine.first_token(old)
    assert before < first < time.monotonic()
    engine.flip(new, "finish")
    flipped = time.monotonic()
    run(engine, qwen, 0.5, first=1000)
    assert flipped < engine.first_token(new) < time.monotonic()
    assert engine.first_token(old) == first

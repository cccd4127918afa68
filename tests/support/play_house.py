"""A node without its sockets, for attempts of several calls: an engine, the books, a driver in its event loop."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from async_rl.trajectory import Packed, Trajectory, check_trajectory, decode_trajectory
from async_rl.version import PolicyId
from async_rl.wire.messages import Lease, SamplingParams
from inference.episodes import Call, Driver, Ended, Episodes, Limits, Withdrawn
from inference.rollout import Attempt, Key, RolloutBook, ToScore

WITHIN_S = 60.0


def lease(number: int, *samples: int, new: int = 6, policy: PolicyId | None = None, split: Any = "train") -> Lease:
    seeds = tuple(1000 * number + sample for sample in samples)
    return Lease(number, number, 0, number, split, samples, seeds, 0, SamplingParams(1.0, new), policy)


class PlayHouse:
    """`run` works until every lease is closed; `done` are the trajectories by (lease, sample), as the buffer would read
    them, `scored` what was to be scored."""

    def __init__(self, engine: Any, task: Any, tokenizer: Any, driver: Driver, limits: Limits) -> None:
        self.engine = engine
        self.book = RolloutBook(task, tokenizer, "node", "torch", plays=("",))
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.episodes = Episodes({"": driver}, limits, self.inbox)
        self.done: dict[Key, Trajectory] = {}
        self.scored: list[ToScore] = []
        self.withdrawn: list[Key] = []

    def start(self, given: Lease) -> None:
        for attempt in self.book.open(given):
            assert isinstance(attempt, Attempt)
            self.episodes.begin(attempt)

    def cancel(self, number: int) -> None:
        for key in self.book.cancel(number):
            self.engine.abort(key)
            self.episodes.cancel(key)

    def run(self, until: Callable[[], bool] | None = None, before_step: Callable[[], None] = lambda: None) -> None:
        until = until or (lambda: not self.book.leases())
        ends = time.monotonic() + WITHIN_S
        while not until():
            assert time.monotonic() < ends, "it takes too long"
            self.read(0.0 if self.engine.active else 0.02)
            before_step()
            for completion in self.engine.step():
                self.episodes.completed(completion)

    def hear(self, until: Callable[[], bool]) -> None:
        """Work through the inbox, and take no step of the engine: what is under way there stays as it is."""
        ends = time.monotonic() + WITHIN_S
        while not until():
            assert time.monotonic() < ends, "it takes too long"
            self.read(0.02)

    def read(self, timeout_s: float) -> None:
        try:
            item = self.inbox.get(timeout=timeout_s) if timeout_s else self.inbox.get_nowait()
            while True:
                self._on(item)
                item = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _on(self, item: Any) -> None:
        match item:
            case Call(request):
                if self.episodes.is_wanted(request.key):
                    try:
                        self.engine.submit(request)
                    except Exception as error:
                        self.episodes.failed(request.key, error)
            case Withdrawn(key):
                self.withdrawn.append(key)
                self.engine.abort(key)
            case Ended(key, played, status, error):
                self.episodes.ended(key)
                outcome = self.book.played(key, played, status, error)
                if isinstance(outcome, ToScore):
                    self.scored.append(outcome)
                    outcome = self.book.scored(key, 1.0, {"right": 1.0}, 0.25, "")
                if isinstance(outcome, Packed):
                    trajectory = decode_trajectory(outcome.joined())
                    check_trajectory(trajectory)
                    self.done[key] = trajectory

    def close(self) -> None:
        self.episodes.close()

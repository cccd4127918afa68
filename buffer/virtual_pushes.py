"""Pushes under a virtual clock: when each node comes to serve which policy.

A node pulls one policy at a time, the newest there is when it begins, as inference/policies.py does: one that is
overtaken meanwhile is served all the same, and what lies between it and the newest is skipped. The pulls that begin
with a publication are drawn and sorted at once, since ten thousand nodes times hundreds of versions are too many for a
queue of events.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator

import numpy as np

from buffer.scenario import Distribution, numbers

IDLE = -1
VERSION_BITS = 24  # of a pull's number, which is (life of the node, version)
VERSIONS = (1 << VERSION_BITS) - 1

Pull = tuple[float, int, int]
"""(when it is over, place, number)"""
NO_PULL: Pull = (math.inf, IDLE, IDLE)


class Pushes:
    """Nodes are numbered by place; a place has one life after the other. `next_at` is when the next pull is over."""

    def __init__(self, places: int, push_s: Distribution, rng: np.random.Generator) -> None:
        self.next_at = math.inf
        self.newest = -1
        self._push_s = push_s
        self._rng = rng
        self._single = numbers(push_s, rng)
        self._alive = bytearray(places)
        self._lives = array("q", [0]) * places
        self._pulls = array("q", [IDLE]) * places  # each place's pull under way
        self._together: Iterator[Pull] = iter(())  # those that began together, in order
        self._first = NO_PULL  # of them
        self._late: list[Pull] = []  # heap of the others

    def join(self, place: int, now: float) -> None:
        """A new life, which pulls the newest policy if there is one."""
        self._alive[place] = 1
        self._lives[place] += 1
        if self.newest >= 0:
            self._pull(place, now)

    def leave(self, place: int) -> None:
        self._alive[place] = 0
        self._pulls[place] = IDLE

    def announce(self, version: int, now: float) -> None:
        """A newer policy: every live node that pulls nothing begins."""
        self.newest = version
        pulls = np.frombuffer(self._pulls, dtype=np.int64)
        places = np.flatnonzero((np.frombuffer(self._alive, dtype=np.uint8) == 1) & (pulls == IDLE))
        numbered = (np.frombuffer(self._lives, dtype=np.int64)[places] << VERSION_BITS) | version
        pulls[places] = numbered
        ends = now + self._push_s.draw(self._rng, len(places))
        together = list(zip(ends.tolist(), places.tolist(), numbered.tolist(), strict=True))
        if self._first is not NO_PULL:
            together += [self._first, *self._together]
        together.sort()
        self._together = iter(together)
        self._first = next(self._together, NO_PULL)
        self._look()

    def finish(self) -> tuple[float, int, int]:
        """The next pull is over: (when, place, version); the place is IDLE if the node has died since. A node that is
        behind begins the next pull."""
        if self._late and self._late[0] < self._first:
            now, place, number = heapq.heappop(self._late)
        else:
            now, place, number = self._first
            self._first = next(self._together, NO_PULL)
        version = number & VERSIONS
        if self._pulls[place] != number:
            place = IDLE
        else:
            self._pulls[place] = IDLE
            if version < self.newest:
                self._pull(place, now)
        self.next_at = min(self._first[0], self._late[0][0]) if self._late else self._first[0]
        return now, place, version

    def _pull(self, place: int, now: float) -> None:
        self._pulls[place] = number = (self._lives[place] << VERSION_BITS) | self.newest
        heapq.heappush(self._late, (now + next(self._single), place, number))
        self._look()

    def _look(self) -> None:
        self.next_at = min(self._first[0], self._late[0][0]) if self._late else self._first[0]

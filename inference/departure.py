"""How a node leaves: told by SIGTERM or by `async-rl drain`, within a grace.

    at once       NodeDraining, and what has not begun is given back; leases that were under way come back too
    then          it goes on sampling and delivering what it has begun, until nothing is left or SETTLE_S before the end
    at the end    what is still unfinished is handed over, to be gone on with elsewhere, and the node says goodbye

Nothing is sampled twice: what is handed over carries its tokens and log-probabilities, and the next random number of
its seed is the next one elsewhere. With handover = "discard" it is given back, and sampled anew; and so is an attempt
of several turns, whose world cannot move (inference.episodes).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from async_rl.trajectory import encode_trajectory
from async_rl.wire.messages import GiveBack, HandOver, Lease, LeaseSamples, Message, NodeDraining
from async_rl.wire.payloads import pack_payloads
from inference.engine import Completion
from inference.rollout import RolloutBook, is_call
from inference.serving import Serving

log = logging.getLogger("node")

SETTLE_S = 1.0  # of the grace, for handing over and closing down

Key = tuple[int, int]
Send = Callable[[Message, Sequence[bytes | memoryview]], None]


class Departure:
    """`send` takes a message to the buffer. Times are in seconds on the node's monotonic clock."""

    def __init__(
        self, book: RolloutBook, serving: Serving, handover: Literal["continue", "discard"], send: Send
    ) -> None:
        self._book = book
        self._serving = serving
        self._handover = handover
        self._send = send
        self._samples_until: float | None = None  # None: the node stays
        self._grace_s = 0.0

    @property
    def began(self) -> bool:
        return self._samples_until is not None

    def begin(self, now: float, grace_s: float, why: str) -> None:
        """Told again, it hurries if that is sooner."""
        until = now + max(0.0, grace_s - SETTLE_S)
        if self._samples_until is not None:
            self._samples_until = min(self._samples_until, until)
            return
        self._samples_until = until
        log.info("leaving within %.1f s: %s", grace_s, why)
        self._grace_s = grace_s
        self.say_again()
        waiting = [request for request in self._serving.waiting() if not is_call(request.key)]
        fresh = [request.key for request in waiting if request.prefix is None]
        for key in fresh:
            self._serving.take_out(key)
        self._give_back(fresh)

    def say_again(self) -> None:
        """To a buffer that was started again too."""
        if self.began:
            self._send(NodeDraining(self._grace_s), ())

    def is_due(self, now: float) -> bool:
        """Whether to `leave` now."""
        return self._samples_until is not None and (now >= self._samples_until or not self._book.leases())

    def refuse(self, lease: Lease) -> None:
        """A lease that was under way when the buffer heard: back as it came."""
        self._send(GiveBack((LeaseSamples(lease.lease, lease.samples),)), ())

    def pass_on(self, prefixes: tuple[msgspec.Raw, ...], blobs: Sequence[bytes | memoryview]) -> None:
        """Packed trajectories of what was sampled so far; the same of a lease that was under way to this node."""
        self._send(HandOver(prefixes), blobs)

    def leave(self) -> int:
        """Hand over what is unfinished, or give it back; returns how many tokens this node sampled of it."""
        begun: list[Completion] = []
        back: list[Key] = []
        sampled = 0
        for key in self._book.owed():
            so_far = self._book.being_scored(key)
            prefix = self._serving.take_out(key) if so_far is None else None
            if prefix is not None:
                sampled += len(prefix.tokens) - prefix.resumed
                so_far = Completion(key, *prefix[:3], "abort", prefix.queued_s, prefix.sampling_s)
            if so_far is None or self._handover == "discard" or self._book.is_evaluation(key):
                back.append(key)
            else:
                begun.append(so_far)
        self._give_back(back)
        if begun:
            self.pass_on(*pack_payloads([encode_trajectory(self._book.handed_over(so_far)) for so_far in begun]))
        tokens = sum(len(so_far.tokens) for so_far in begun)
        log.info("left: %d attempts with %d tokens handed over, %d given back", len(begun), tokens, len(back))
        return sampled

    def _give_back(self, keys: Iterable[Key]) -> None:
        leases: dict[int, list[int]] = defaultdict(list)
        for lease, sample in keys:
            self._book.forget((lease, sample))
            leases[lease].append(sample)
        if leases:
            self._send(GiveBack(tuple(LeaseSamples(lease, tuple(samples)) for lease, samples in leases.items())), ())

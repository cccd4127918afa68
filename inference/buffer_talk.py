"""What a node says to the buffer, and to which of its shards.

    to the shard of the lease   results, what is given back, what is handed over
    to the shard that is asked  NodeWants (async_rl.asking)
    to all of them              who it is, that it leaves, that a policy did not come
    to each when it matters     what it serves and holds: see below

A shard has to know what a node serves before it can lease it anything, and no token counts before the node has shown
the policy it is of. Of several shards most have nothing to do with a node just now. So the first hears at once (it
evaluates, and measures pushes), and so do those that may lease something at any moment, or have set the node aside (a
run ends when a shard has had all nodes aside for too long); the others hear it before the next that is said to them,
and of what came and went while the node had no lease of theirs only the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from async_rl.asking import Asking
from async_rl.bundle import bundled
from async_rl.run.shard_links import BufferLink, clients_of, sender_of
from async_rl.shards import home_shard, shard_of
from async_rl.trajectory import Packed, decode_trajectory
from async_rl.wire.link import Client, Received
from async_rl.wire.messages import (
    GiveBack,
    HandOver,
    Message,
    NodeHolds,
    NodeServing,
    Results,
)
from async_rl.wire.payloads import coalesce, pack_payloads, unpack_payloads

Item = TypeVar("Item")


class BufferTalk:
    """`leases` says which leases the node works on."""

    def __init__(
        self, buffer: BufferLink, name: str, group_size: int, leases: Callable[[], Iterable[int]]
    ) -> None:
        self._buffer = buffer
        self.clients: tuple[Client, ...] = clients_of(buffer)
        self.shards = len(self.clients)
        self.asking = Asking(self.shards, group_size, home_shard(name, self.shards))
        self._leases = leases
        self._untold: list[list[NodeServing | NodeHolds]] = [[] for _ in self.clients]
        self._aside: set[int] = set()  # shards that have set this node aside, and have leased it nothing since
        self._only: int | None = None
        self._sessions = self._counted()

    # --- who is there ------------------------------------------------------------------------------------------------

    def _counted(self) -> list[int]:
        return [client.sessions for client in self.clients]

    def begin(self) -> None:
        self._sessions = self._counted()

    def new_shards(self) -> list[int]:
        """Those that were started again, or have forgotten this node, since the last look."""
        before, self._sessions = self._sessions, self._counted()
        return [shard for shard, count in enumerate(self._sessions) if count > before[shard]]

    def shard_of(self, received: Received) -> int:
        return sender_of(self._buffer, received)

    def leases_of(self, shard: int) -> tuple[int, ...]:
        return tuple(lease for lease in self._leases() if shard_of(lease, self.shards) == shard)

    @contextmanager
    def only(self, shard: int) -> Iterator[None]:
        """What is said goes to one that knows nothing yet."""
        self._untold[shard].clear()
        self.asking.restarted(shard)
        self._only = shard
        try:
            yield
        finally:
            self._only = None

    def granted(self, lease: int, samples: int) -> None:
        shard = shard_of(lease, self.shards)
        self._aside.discard(shard)
        self.asking.granted(shard, samples)

    def set_aside(self, shard: int) -> None:
        """The shard leases this node nothing until it serves a later policy: from now on it hears of each at once, and
        of one that it has not been told of now."""
        self._aside.add(shard)
        self._catch_up(shard)

    def flush(self, timeout_s: float) -> None:
        self._buffer.flush(timeout_s)

    # --- what is said ------------------------------------------------------------------------------------------------

    def send(self, message: Message, blobs: Sequence[bytes | memoryview] = ()) -> None:
        """To whom it concerns."""
        if self._only is not None:
            self.clients[self._only].send(message, blobs)
        elif self.shards == 1:
            self.clients[0].send(message, blobs)
        elif isinstance(message, NodeServing | NodeHolds):
            self._show(message)
        elif isinstance(message, GiveBack):
            for shard, back in self._by_shard(message.leases, lambda each: each.lease).items():
                self.tell(shard, GiveBack(tuple(back)))
        elif isinstance(message, HandOver):
            payloads = unpack_payloads(message.prefixes, blobs)
            for shard, own in self._by_shard(payloads, lambda each: decode_trajectory(each).lease).items():
                inline, large = pack_payloads(own)
                self.tell(shard, HandOver(inline), large)
        else:
            for shard in range(self.shards):
                self.tell(shard, message, blobs)

    def tell(self, shard: int, message: Message, blobs: Sequence[bytes | memoryview] = ()) -> None:
        """One shard, after what it has not been told of."""
        self._catch_up(shard)
        self.clients[shard].send(message, blobs)

    def _catch_up(self, shard: int) -> None:
        untold, self._untold[shard] = self._untold[shard], []
        for each in untold:
            self.clients[shard].send(each)

    def results(self, trajectories: Sequence[Packed]) -> Iterator[tuple[int, Results, list[bytes | memoryview]]]:
        """Messages with these, each for the shard of its leases."""
        for shard, own in self._by_shard(trajectories, lambda each: each.lease).items():
            for batch in coalesce(own):
                inline, blobs = pack_payloads(bundled(batch))
                yield shard, Results(inline), blobs

    def _show(self, message: NodeServing | NodeHolds) -> None:
        for shard, untold in enumerate(self._untold):
            if isinstance(message, NodeServing) and not self.leases_of(shard):
                untold[:] = [each for each in untold if isinstance(each, NodeHolds)]
            if shard == 0 or shard in self._aside or self.asking.waits_at(shard):
                self.tell(shard, message)
            else:
                untold.append(message)

    def _by_shard(self, items: Iterable[Item], lease: Callable[[Item], int]) -> dict[int, list[Item]]:
        parts: dict[int, list[Item]] = defaultdict(list)
        for item in items:
            parts[shard_of(lease(item), self.shards)].append(item)
        return parts

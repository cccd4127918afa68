"""The store's part in relaying: tells nodes from whom to pull, by the rules of buffer.relays.

A node that asks (FindSource) hears it at once or when there is room, and again, unasked, when its source is lost or
slow. Where there are keys, a relay hears whom to let in before anybody is sent to it, and who pulls from it which key
to expect: the one that the relay's own link to the store was authenticated with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from async_rl.version import PolicyId
from async_rl.wire.link import Server
from async_rl.wire.messages import FindSource, Message, NodeRelay, Pulled, RelayKeys, Source, StoreStatus
from buffer.policy_files import PolicyFiles
from buffer.relays import STORE, Grant, Relays

log = logging.getLogger("store")

LOOK_S = 1.0  # between looks at who may come in, and at who is gone for good


class StoreRelays:
    """`send` is to a peer that may have left."""

    def __init__(
        self, server: Server, files: PolicyFiles, relays: Relays, send: Callable[[str, Message], None]
    ) -> None:
        self._server = server
        self._files = files
        self._relays = relays
        self._send = send
        self._admitted: frozenset[str] = frozenset()
        self._next_look = 0.0
        self._relayed_bytes = 0

    @property
    def some(self) -> bool:
        """Whether any node relays."""
        return bool(self._relays.volunteers)

    def joined(self, node: str, resumed: bool) -> None:
        if resumed:
            self._relays.back(node)
        elif self._server.keys is not None:
            self._send(node, RelayKeys(tuple(sorted(self._server.keys.keys_of("node")))))

    def lost(self, node: str) -> None:
        self._tell(self._relays.lost(node, time.monotonic()))

    def introduced(self, node: str, message: NodeRelay) -> None:
        if message.endpoint:
            log.info("%s relays to others, at %s", node, message.endpoint)
        self._relays.joined(node, message.place, message.endpoint)
        self._files.hash_chunks = self.some

    def asked(self, node: str, message: FindSource) -> None:
        policy = message.policy
        if self._files.get(policy) is None:
            self._send(node, Source(policy, error="the store does not have it (any more)"))
            return
        if message.failed:
            log.warning("%s gives up relay %s for policy %s: %s", node, message.failed, policy.short(), message.trouble)
        known = set(self._relays.liars)
        grants = self._relays.ask(node, policy, time.monotonic(), message.failed, message.trouble)
        for liar in set(self._relays.liars) - known:
            log.error("relay %s is not used any more: several nodes had bytes of it that were no policy's", liar)
        self._tell(grants)

    def replaced(self, policy: PolicyId) -> None:
        """A policy's file is another one from now on."""
        self._relays.replaced(policy)

    def pulled(self, node: str, message: Pulled) -> None:
        entry = self._files.get(message.policy)
        if entry is not None:
            self._relayed_bytes += min(message.relayed, entry.size)
        self._tell(self._relays.pulled(node, message.policy, time.monotonic()))

    def tick(self, now: float) -> None:
        """Between messages: those that have waited for long enough."""
        self._tell(self._relays.tick(now))
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        for node in set(self._relays.names) - set(self._server.peers):
            self._tell(self._relays.left(node, now))
        self._relays.forget(self._files.sizes)
        self._files.hash_chunks = self.some
        keys = self._server.keys
        if keys is not None and self.some and keys.keys_of("node") != self._admitted:
            self._admitted = keys.keys_of("node")
            for relay in self._relays.volunteers:
                self._send(relay, RelayKeys(tuple(sorted(self._admitted))))

    def status(self, served_bytes: int) -> StoreStatus:
        relays = self._relays
        bypasses = {str(why): count for why, count in relays.bypasses.items()}
        return StoreStatus(
            served_bytes, self._relayed_bytes, tuple(relays.volunteers), bypasses, tuple(relays.liars)
        )

    def _tell(self, grants: Iterable[Grant]) -> None:
        for node, policy, relay in grants:
            self._send(node, self._source(policy, relay))

    def _source(self, policy: PolicyId, relay: str) -> Source:
        entry, chunks = self._files.get(policy), self._files.chunks(policy)
        if entry is None or chunks is None:
            return Source(policy, error="the store does not have it (any more)")
        if relay == STORE:
            return Source(policy, size=entry.size, sha256=entry.sha256, chunks=chunks)
        endpoint, key = self._relays.endpoint(relay), self._server.key_of(relay)
        return Source(policy, relay, endpoint, key, entry.size, entry.sha256, chunks)

"""The policy store: keeps policy files whole (buffer.policy_files), announces them, and serves them in chunks to
whoever asks; where nodes relay, it serves a few and says to the others from whom to pull (buffer.relaying)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from async_rl.buffer_config import BufferConfig
from async_rl.proof import CANARY
from async_rl.run.dial import listen
from async_rl.run.exporter import Reading
from async_rl.run.killpoints import reached
from async_rl.run.process import PoolContext, pool_main
from async_rl.wire.link import LinkError, PeerJoined, Received, Server
from async_rl.wire.messages import (
    Announce,
    Chunk,
    FindSource,
    Finish,
    Message,
    NodeRelay,
    PinPolicy,
    Pull,
    Pulled,
    Route,
    Routed,
    RouteFile,
    StatusRequest,
    Stop,
    Stored,
    Upload,
)
from buffer.gauges import StoreGauges
from buffer.policy_files import PolicyFiles
from buffer.relaying import StoreRelays
from buffer.relays import Relays
from buffer.routes import StoredPolicy

log = logging.getLogger("store")

POLL_S = 0.1
PARTING_S = 5.0
MAX_UNREAD_CHUNKS = 64  # a puller asks for a few at a time; each may be as large as Pull.count allows


class StoreService:
    """`relays`: by which rules nodes relay; those of the default configuration without."""

    def __init__(
        self, context: PoolContext, server: Server, files: PolicyFiles, relays: Relays | None = None
    ) -> None:
        self._stopping = context.stopping
        self._exporter = context.exporter
        self._watchdog = context.watchdog
        self._gauges = StoreGauges()
        self._server = server
        self._files = files
        if relays is None:
            relays = Relays(BufferConfig().relay_fanout, BufferConfig().relay_timeout)
        self._relays = StoreRelays(server, files, relays, self._send)
        self._trainer: str | None = None

    def serve(self) -> None:
        while not self._stopping.is_set():
            self._watchdog.beat("takes what its peers send")
            self._exporter.offer(time.monotonic(), self._reading)
            for event in self._server.poll(POLL_S):
                if isinstance(event, PeerJoined):
                    self._on_joined(event)
                elif isinstance(event, Received):
                    if isinstance(event.message, Finish) and event.peer == self._trainer:
                        self._part()
                        return
                    self._handle(event)
                elif event.peer == self._trainer:
                    log.warning("the trainer is gone: %s", event.reason)
                    if event.peer not in self._server.peers:
                        self._trainer = None
                elif event.role == "node":
                    self._relays.lost(event.peer)
            self._relays.tick(time.monotonic())

    def _on_joined(self, joined: PeerJoined) -> None:
        """A node hears of the canary and the newest policy at once: it shows the one and serves the other before its
        first token. The first trainer is the one whose uploads count until it has left."""
        if joined.role == "node":
            self._relays.joined(joined.peer, joined.resumed)
            for entry in (self._files.canary, self._files.newest):
                if entry is not None:
                    self._announce(joined.peer, entry)
        elif joined.role == "trainer" and self._trainer in (None, joined.peer) and not joined.resumed:
            self._trainer = joined.peer
            self._files.forget_pins()
            self._files.give_up_partial()

    def _handle(self, received: Received) -> None:
        message: Message = received.message
        from_trainer = received.peer == self._trainer
        if isinstance(message, Upload) and from_trainer:
            self._on_upload(received.peer, message, received.blobs)
        elif isinstance(message, PinPolicy) and from_trainer:
            self._files.pin(message.policy, message.pinned)
        elif isinstance(message, Pull):
            self._on_pull(received.peer, message)
        elif isinstance(message, Route):
            self._on_route(received.peer, message)
        elif isinstance(message, NodeRelay | FindSource | Pulled) and received.role == "node":
            self._on_relaying(received.peer, message)
        elif isinstance(message, StatusRequest):
            self._send(received.peer, self._relays.status(self._gauges.served_bytes))
        else:
            self._gauges.misplaced()
            log.warning("%s sent %s, which is not for it to send", received.peer, type(message).__name__)

    def _on_upload(self, peer: str, upload: Upload, blobs: Sequence[memoryview]) -> None:
        try:
            if len(blobs) != 1:
                raise ValueError(f"policy {upload.policy.short()}: a part came in {len(blobs)} frames, not in one")
            before = self._files.get(upload.policy)
            with self._watchdog.working(f"waits for the disk to have policy {upload.policy.short()}"):
                entry = self._files.add(upload, blobs[0])
        except ValueError as error:
            log.error("%s", error)
            self._disconnect(peer, str(error))
            return
        if entry is None:
            return
        if before is not None and before.sha256 != entry.sha256:
            self._relays.replaced(entry.policy)
        for node, role in list(self._server.peers.items()):
            if role == "node" and (entry.kind == CANARY or (entry.order and entry.order == self._files.newest_order)):
                self._announce(node, entry)
        reached("store.after-announce")
        self._send(peer, Stored(upload.policy))

    def _announce(self, node: str, entry: StoredPolicy) -> None:
        self._send(node, Announce(*entry[:5], self._relays.some))

    def _on_relaying(self, node: str, message: NodeRelay | FindSource | Pulled) -> None:
        if isinstance(message, NodeRelay):
            self._relays.introduced(node, message)
        elif isinstance(message, Pulled):
            self._relays.pulled(node, message)
        elif not self._reads_no_answers(node):
            with self._watchdog.working(f"reads policy {message.policy.short()} for the digests of its chunks"):
                self._relays.asked(node, message)

    def _on_route(self, peer: str, asked: Route) -> None:
        if self._reads_no_answers(peer):
            return
        files = self._files.route(asked.policy, asked.have)
        if files is None:
            self._send(peer, Routed(asked.policy, error="the store does not have it (any more), or no way to it"))
        else:
            self._send(peer, Routed(asked.policy, tuple(RouteFile(*entry[:4]) for entry in files)))

    def _reads_no_answers(self, peer: str) -> bool:
        """It is disconnected then."""
        if self._server.backlog(peer) < MAX_UNREAD_CHUNKS:
            return False
        self._disconnect(peer, f"it asks on and on, and has left {MAX_UNREAD_CHUNKS} answers unread")
        return True

    def _on_pull(self, peer: str, pull: Pull) -> None:
        if self._reads_no_answers(peer):
            return
        entry = self._files.get(pull.policy)
        data = self._files.read(pull.policy, pull.offset, pull.count) if entry else None
        if entry is None or data is None:
            self._send(peer, Chunk(pull.policy, pull.offset, 0, "", error="the store does not have it (any more)"))
        else:
            self._gauges.pulled(len(data))
            self._send(peer, Chunk(pull.policy, pull.offset, entry.size, entry.sha256), [data])

    def _disconnect(self, peer: str, reason: str) -> None:
        with suppress(LinkError):  # it may have left already
            self._server.disconnect(peer, reason)

    def _send(self, peer: str, message: Message, blobs: Sequence[bytes] = ()) -> None:
        """To a peer that may have left since it asked; when it comes back it is greeted again."""
        try:
            self._server.send(peer, message, blobs)
        except LinkError as error:
            log.info("%s", error)

    def _reading(self) -> Reading:
        newest = self._files.newest
        relaying = self._relays.status(self._gauges.served_bytes)
        return self._gauges.reading(self._files.sizes, newest.policy if newest else None, self._server, relaying)

    def _part(self) -> None:
        for peer in list(self._server.peers):
            self._send(peer, Stop("the run is over"))
        for _ in range(int(PARTING_S / POLL_S)):
            if not self._server.peers:
                return
            self._server.poll(POLL_S)


def body(context: PoolContext) -> None:
    with context.directory.alone(context.name):
        _serve(context)


def _serve(context: PoolContext) -> None:
    directory = context.directory
    server = listen(context, directory.store_endpoint)
    log.info("policy store listens at %s", server.endpoint)
    # Without the buffer's journal, what was trained after the checkpoint is void, and so are its policies.
    keep = directory.journal.is_dir() and any(directory.journal.iterdir())
    settings = context.config.buffer
    files = PolicyFiles(directory.adapters / "store", directory.run_id, settings.max_staleness, keep)
    try:
        StoreService(context, server, files, Relays(settings.relay_fanout, settings.relay_timeout)).serve()
    finally:
        files.give_up_partial()
        server.close()


if __name__ == "__main__":
    pool_main(__file__, body)

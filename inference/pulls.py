"""One policy file on its way to a node: in chunks, from the store or from a relay, verified before it is used.

Where nodes relay, the store says from whom to pull (Source), with the digest of every chunk: what a relay sends is
compared with these before it is written, and passed on to others if this node relays, too. A relay that is silent for
`buffer.relay_timeout`, cannot be reached, does not have the file, or sends other bytes is left: the store names another
source, and the pull goes on where it stopped. A relay that only says that it waits itself is believed for PATIENCE of
those time-outs. The whole file's SHA-256 is compared at the end wherever it came from.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from async_rl.errors import AsyncRLError
from async_rl.run.dial import dial_relay, listen_as_relay
from async_rl.run.process import PoolContext
from async_rl.version import PolicyId
from async_rl.wire.link import Client, LinkError, LinkTimeout, Received
from async_rl.wire.messages import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Chunk,
    FindSource,
    NodeRelay,
    NotYet,
    Pull,
    Pulled,
    RelayKeys,
    RouteFile,
    Source,
    Trouble,
)
from async_rl.wire.security import with_port_of
from inference.relay import Relay, SharedFile

log = logging.getLogger("policies")

CHUNKS_AHEAD = 4  # outstanding requests: enough to keep a link busy, little enough to abandon
CHUNK_TIMEOUT_S = 30.0
IDLE_S = 0.2
PATIENCE = 2  # time-outs: one in which the relay finds out that its own source is gone, and one to spare
HASH_TIMEOUT_S = 30.0


class Relaying(NamedTuple):
    """What it takes to pull from relays: `dial` makes a link to one, not connected yet; `place` as in NodeRelay;
    `relay` is this node's own, if it volunteers."""

    dial: Callable[[Source], Client]
    timeout_s: float
    place: str
    relay: Relay | None = None


class RelayFailed(AsyncRLError):
    """The relay cannot be pulled from any more."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble: Trouble = trouble


class _Way:
    """How far one pull is, and whence the rest comes; `source` is None where the store told nothing but the chunks."""

    def __init__(self, policy: PolicyId, expected: RouteFile | None) -> None:
        self.policy = policy
        self.source: Source | None = None
        self.size, self.sha256 = (expected.size, expected.sha256) if expected is not None else (CHUNK_BYTES, "")
        self.asked = self.received = self.relayed = 0
        self.news: Source | None = None  # the store has named another source, unasked

    def follow(self, source: Source) -> None:
        """From now on from there. Raises AsyncRLError when the store does not have the file, or has another."""
        if source.error:
            raise AsyncRLError(f"policy {self.policy.short()}: {source.error}")
        if self.sha256 and (source.size, source.sha256) != (self.size, self.sha256):
            raise AsyncRLError(f"policy {self.policy.short()} became another file while it was pulled")
        if len(source.chunks) != DIGEST_BYTES * -(-source.size // CHUNK_BYTES):
            raise AsyncRLError(f"policy {self.policy.short()}: the store's digests are not of {source.size} bytes")
        self.source = source
        self.size, self.sha256 = source.size, source.sha256
        self.asked = self.received

    @property
    def relay(self) -> str:
        return self.source.relay if self.source is not None else ""

    def is_chunk(self, data: memoryview) -> bool:
        """Whether these are the next bytes, as far as the store has told."""
        if self.source is None:
            return True
        start = self.received // CHUNK_BYTES * DIGEST_BYTES
        return hashlib.sha256(data).digest() == self.source.chunks[start : start + DIGEST_BYTES]


class FilePuller:
    """Pulls over `store`, in the puller's thread. `note` hears of every message of the store that is not of a file;
    `check_open` raises when the node ends."""

    def __init__(
        self,
        store: Client,
        note: Callable[[object], None],
        check_open: Callable[[str], None],
        relaying: Relaying | None = None,
    ) -> None:
        self.relayed = False
        """Whether to ask the store from whom to pull: it has said that there are relays."""
        self._store = store
        self._note = note
        self._check_open = check_open
        self._relaying = relaying
        self._link: tuple[str, Client] | None = None  # to the relay that was pulled from last

    def introduce(self) -> None:
        """In every session with the store. Where there are keys a relay waits for the list of those to let in."""
        if self._relaying is not None:
            relay = self._relaying.relay
            ready = relay is not None and (relay.keys is None or relay.keys.admits_some)
            self._store.send(NodeRelay(self._relaying.place, relay.address if relay is not None and ready else ""))

    def admit(self, message: RelayKeys) -> None:
        """Who may dial this node's relay."""
        relay = self._relaying.relay if self._relaying is not None else None
        if relay is not None and relay.keys is not None:
            first = not relay.keys.admits_some
            relay.keys.admit(message.keys)
            if first:
                self.introduce()

    def close(self) -> None:
        self._hang_up()

    def pull(self, policy: PolicyId, path: Path, expected: RouteFile | None = None) -> None:
        """The file of a policy, whole and verified, to `path`. Raises AsyncRLError, LinkError when the store is lost,
        and OSError."""
        self._check_open(f"policy {policy.short()} came")
        way = _Way(policy, expected)
        relay = self._relaying.relay if self._relaying is not None else None
        if self._relaying is None or not (self.relayed or relay):
            self._write(way, path, None)
            return
        shared = relay.pulls(policy) if relay is not None else None
        try:
            way.follow(self._find(FindSource(policy)))
            self._write(way, path, shared)
        except BaseException as error:
            if relay is not None:
                relay.drop(policy)
                if isinstance(error, OSError):  # the disk may be full of what is kept for others
                    relay.drop_all()
            raise
        self._store.send(Pulled(policy, way.relayed))

    def _write(self, way: _Way, path: Path, shared: SharedFile | None) -> None:
        """A chunk is hashed while it is written, as both take about as long (a pull of 160 MB: 0.26 s, 0.23 s so; of 4
        at once: 1.8 s, 1.4 s)."""
        digest = hashlib.sha256()
        hashing: Future[None] | None = None
        with path.open("wb") as file, ThreadPoolExecutor(1, "policy-hash") as hasher:
            if shared is not None:
                shared.begin(path, way.size, way.sha256)
            while way.received < way.size:
                data = self._next(way)
                if hashing is not None:
                    hashing.result(HASH_TIMEOUT_S)  # so that no more than one chunk waits for it
                hashing = hasher.submit(digest.update, data)
                file.write(data)
                way.received += data.nbytes
                if shared is not None:
                    file.flush()
                    shared.verified(way.received)
        if digest.hexdigest() != way.sha256:
            raise AsyncRLError(f"policy {way.policy.short()} arrived damaged: its SHA-256 is not the announced one")

    def _next(self, way: _Way) -> memoryview:
        """The next chunk, verified as far as the store told its digest, from whom it can be had."""
        while True:
            news, way.news = way.news, None
            if news is not None and (news.error or news.relay != way.relay):
                log.info("policy %s: goes on from %s", way.policy.short(), news.relay or "the store")
                way.follow(news)
            if not way.relay:
                data = self._from_store(way)
                if data is not None:
                    return data
                continue
            try:
                data = self._from_relay(way)
            except RelayFailed as failed:
                log.warning(
                    "policy %s: relay %s is left at byte %d: %s", way.policy.short(), way.relay, way.received,
                    failed.trouble,
                )  # fmt: skip
                self._hang_up()
                way.follow(self._find(FindSource(way.policy, way.relay, failed.trouble)))
                continue
            if data is not None:
                way.relayed += data.nbytes
                return data

    def _ask_ahead(self, link: Client, way: _Way) -> None:
        while way.asked < way.size and way.asked - way.received < CHUNKS_AHEAD * CHUNK_BYTES:
            link.send(Pull(way.policy, way.asked, CHUNK_BYTES))
            way.asked += CHUNK_BYTES

    # --- from the store ----------------------------------------------------------------------------------------------

    def _from_store(self, way: _Way) -> memoryview | None:
        """None: the rest is to come from elsewhere."""
        self._ask_ahead(self._store, way)
        deadline = time.monotonic() + CHUNK_TIMEOUT_S
        short, at = way.policy.short(), way.received
        while True:
            got = self.receive(deadline, f"bytes of policy {short} from {at}")
            chunk = got.message
            if self._is_news(chunk, way):
                return None
            if not isinstance(chunk, Chunk):
                self._note(chunk)
            elif chunk.policy == way.policy and chunk.offset == at:
                if chunk.error:
                    raise AsyncRLError(f"policy {short}: {chunk.error}")
                if len(got.blobs) != 1:
                    raise AsyncRLError(f"the store sent {len(got.blobs)} frames of policy {short}, not one")
                break
        if way.sha256 and (chunk.size, chunk.sha256) != (way.size, way.sha256):
            raise AsyncRLError(f"policy {short} became another file while it was pulled")
        way.size, way.sha256 = chunk.size, chunk.sha256
        data = got.blobs[0]
        if data.nbytes != min(CHUNK_BYTES, way.size - at):
            raise AsyncRLError(f"the store sent {data.nbytes} bytes of {short} at {at}")
        if not way.is_chunk(data):
            raise AsyncRLError(f"policy {short} arrived damaged: its bytes from {at} are not the announced ones")
        return data

    def _is_news(self, message: object, way: _Way) -> bool:
        if isinstance(message, Source) and message.policy == way.policy and self._relaying is not None:
            way.news = message
            return True
        return False

    def _find(self, ask: FindSource) -> Source:
        """From whom; the store may take a time-out to say. It is asked again when it was started anew meanwhile."""
        assert self._relaying is not None
        deadline = time.monotonic() + self._relaying.timeout_s + CHUNK_TIMEOUT_S
        sessions = self._store.sessions
        self._store.send(ask)
        while True:
            try:
                message = self.receive(min(deadline, time.monotonic() + IDLE_S), f"a source of {ask.policy.short()}")
            except LinkTimeout:
                if time.monotonic() > deadline:
                    raise
                if self._store.sessions > sessions:
                    sessions = self._store.sessions
                    self._store.send(FindSource(ask.policy))
                continue
            if isinstance(message.message, Source) and message.message.policy == ask.policy:
                return message.message
            self._note(message.message)

    def receive(self, deadline: float, awaiting: str) -> Received:
        """The store's next message; in slices, so that a node which is to end need not wait for a store that does not
        answer."""
        while True:
            self._check_open(f"{awaiting} came")
            try:
                return self._store.receive(IDLE_S, awaiting)
            except LinkTimeout as timeout:
                if time.monotonic() > deadline:
                    raise LinkTimeout(
                        f"{self._store.name} waited {CHUNK_TIMEOUT_S:g} s for {awaiting} from {self._store.peer} at "
                        f"{self._store.endpoint}"
                    ) from timeout

    # --- from a relay ------------------------------------------------------------------------------------------------

    def _from_relay(self, way: _Way) -> memoryview | None:
        """None: the rest is to come from elsewhere. Raises RelayFailed."""
        assert self._relaying is not None
        link = self._dialled(way)
        try:
            self._ask_ahead(link, way)
        except LinkError as lost:
            raise RelayFailed("gone") from lost
        got = self._relays_answer(link, way, self._relaying.timeout_s)
        if got is None:
            return None
        chunk, data = got.message, got.blobs[0] if len(got.blobs) == 1 else memoryview(b"")
        if chunk.error or (chunk.size, chunk.sha256) != (way.size, way.sha256):  # of the policy in another form
            raise RelayFailed("gone")
        if data.nbytes != min(CHUNK_BYTES, way.size - way.received) or not way.is_chunk(data):
            raise RelayFailed("damaged")
        return data

    def _relays_answer(self, link: Client, way: _Way, timeout_s: float) -> Received | None:
        started = heard = time.monotonic()
        while True:
            self._check_open(f"bytes of policy {way.policy.short()} came")
            while (news := self._store.poll()) is not None:
                if self._is_news(news.message, way):
                    return None
                self._note(news.message)
            message: object = None
            try:
                got = link.receive(min(IDLE_S, timeout_s / 4), f"bytes of policy {way.policy.short()}")
                message = got.message
            except LinkTimeout:
                pass
            except LinkError as lost:
                raise RelayFailed("gone") from lost
            if isinstance(message, Chunk) and (message.policy, message.offset) == (way.policy, way.received):
                return got
            now = time.monotonic()
            if isinstance(message, NotYet) and message.policy == way.policy:
                heard = now
            if now - heard > timeout_s or now - started > PATIENCE * timeout_s:
                raise RelayFailed("silent")

    def _dialled(self, way: _Way) -> Client:
        """The link to its relay; the one from before, where it is the same. Raises RelayFailed."""
        assert self._relaying is not None
        assert way.source is not None
        whom = f"{way.source.endpoint} {way.source.key}"
        if self._link is not None and self._link[0] == whom:
            return self._link[1]
        self._hang_up()
        deadline = time.monotonic() + self._relaying.timeout_s
        try:
            link = self._relaying.dial(way.source)
            self._link = (whom, link)
            while True:
                self._check_open(f"relay {way.relay} answered")
                try:
                    link.connect(min(IDLE_S, self._relaying.timeout_s))
                    return link
                except LinkTimeout:
                    if time.monotonic() > deadline:
                        raise
        except LinkError as lost:
            raise RelayFailed("unreachable") from lost
        except AsyncRLError as refused:
            self._check_open(f"relay {way.relay} answered")
            raise RelayFailed("unreachable") from refused

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link[1].close(0.0)
            self._link = None


def relaying_of(context: PoolContext) -> Relaying:
    """A node's, by its configuration; with inference.relay its relay listens from now on. Raises LinkError when the
    endpoint is taken, AsyncRLError when it is not allowed."""
    inference, timeout_s = context.config.inference, context.config.buffer.relay_timeout
    relay = None
    if inference.relay:
        server, keys = listen_as_relay(context, inference.relay_endpoint)
        address = with_port_of(inference.relay_address or server.endpoint, server.endpoint)
        relay = Relay(server, address, timeout_s, keys)
        log.info("relays policies at %s; others dial %s", server.endpoint, address)
    return Relaying(partial(dial_relay, context), timeout_s, place(), relay)


def place() -> str:
    """One for all processes that reach each other's loopback: those of one boot and one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename

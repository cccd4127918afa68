"""A node that relays: it passes on to other nodes the policy files that it pulls, chunk by chunk.

A chunk is passed on as soon as this node has verified it against the digest that the store gave, so a file is as far
behind in the next node as a chunk takes, and not as the file does. What is asked for and is not here yet is answered
when it comes; until then a word now and then says that this node waits itself (NotYet). The last RELAY_KEEPS files are
kept, by open descriptors: the node may take their names away.

A thread of its own serves, with a socket of its own, so that neither sampling nor pulling waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from async_rl.version import PolicyId
from async_rl.wire.keys import NodeDoorKeys
from async_rl.wire.link import LinkError, PeerLost, Received, Server
from async_rl.wire.messages import RELAY_KEEPS, Chunk, Message, NotYet, Pull

log = logging.getLogger("relay")

IDLE_S = 0.1
PENDING_S = 0.02  # between looks at what has come meanwhile, while somebody waits for it
MAX_UNANSWERED = 64  # a puller asks for a few chunks at a time
END_S = 2.0


class SharedFile:
    """A file that this node pulls, or has pulled. The puller says how far it is verified; the relay's thread reads."""

    def __init__(self) -> None:
        self.size = 0
        self.sha256 = ""
        self._verified = 0
        self._descriptor: int | None = None
        self._gone = False
        self._lock = threading.Lock()  # so that a descriptor is not closed while it is read, and then another file's

    def begin(self, path: Path, size: int, sha256: str) -> None:
        """The file is at `path`, and empty as yet; of so many bytes, and of this SHA-256, in the end."""
        with self._lock:
            if not self._gone:
                self.size, self.sha256 = size, sha256
                self._descriptor = os.open(path, os.O_RDONLY)

    def verified(self, size: int) -> None:
        """So many bytes are written, and are the file's."""
        self._verified = size

    def read(self, offset: int, count: int) -> bytes | None:
        """None: not yet. Raises LookupError for what will not come."""
        with self._lock:
            if self._gone or (self._descriptor is not None and offset > self.size):
                raise LookupError("this node does not have it")
            if self._descriptor is None or self._verified < min(offset + count, self.size):
                return None
            return os.pread(self._descriptor, min(count, self.size - offset), offset)

    def close(self) -> None:
        with self._lock:
            self._gone = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class _Asked(NamedTuple):
    """What is to be answered when it has come; `told`: when its node last heard that it has not."""

    peer: str
    pull: Pull
    told: float


class Relay:
    """Owns `server` from now on. `address` is where others dial it. `timeout_s` is how long these wait for a word."""

    def __init__(self, server: Server, address: str, timeout_s: float, keys: NodeDoorKeys | None = None) -> None:
        self.address = address
        self.keys = keys
        self.served_bytes = 0
        self._server = server
        self._word_s = timeout_s / 3
        self._files: dict[PolicyId, SharedFile] = {}
        self._asked: list[_Asked] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def pulls(self, policy: PolicyId) -> SharedFile:
        """This node is about to pull a file; the oldest that it keeps goes for it. In the puller's thread."""
        self.drop(policy)
        while len(self._files) >= RELAY_KEEPS:
            self.drop(next(iter(self._files)))
        file = SharedFile()
        self._files[policy] = file
        return file

    def drop(self, policy: PolicyId) -> None:
        """Of one that did not come whole, too."""
        file = self._files.pop(policy, None)
        if file is not None:
            file.close()

    def drop_all(self) -> None:
        """Those that pull from here go elsewhere, without having to wait."""
        for policy in list(self._files):
            self.drop(policy)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(END_S)
        self.drop_all()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for event in self._server.poll(PENDING_S if self._asked else IDLE_S):
                    if isinstance(event, Received):
                        self._on_received(event)
                    elif isinstance(event, PeerLost):
                        self._asked = [asked for asked in self._asked if asked.peer != event.peer]
                self._answer_all(time.monotonic())
        except Exception:  # the node goes on: those that pull from it go elsewhere
            log.exception("this node relays no more")
        finally:
            self._server.close()

    def _on_received(self, received: Received) -> None:
        peer, message = received.peer, received.message
        if received.role != "node" or not isinstance(message, Pull):
            log.warning("%s sent %s, which is not for it to send", peer, type(message).__name__)
            return
        waiting = sum(asked.peer == peer for asked in self._asked)
        if waiting + self._server.backlog(peer) >= MAX_UNANSWERED:
            with suppress(LinkError):  # it may have left already
                self._server.disconnect(peer, f"it asks on and on, and has {MAX_UNANSWERED} answers to come or unread")
            self._asked = [asked for asked in self._asked if asked.peer != peer]
            return
        self._asked.append(_Asked(peer, message, time.monotonic()))

    def _answer_all(self, now: float) -> None:
        """Each peer in the order in which it asked: a puller takes no chunk before its turn."""
        waiting: set[str] = set()
        left = []
        for asked in self._asked:
            still = asked if asked.peer in waiting else self._answer(asked, now)
            if still is not None:
                waiting.add(asked.peer)
                left.append(still)
        self._asked = left

    def _answer(self, asked: _Asked, now: float) -> _Asked | None:
        """None, once it is answered."""
        policy, offset, count = asked.pull.policy, asked.pull.offset, asked.pull.count
        file = self._files.get(policy)
        try:
            if file is None:
                raise LookupError("this node does not have it")
            data = file.read(offset, count)
        except (LookupError, OSError) as error:
            self._send(asked.peer, Chunk(policy, offset, 0, "", error=str(error)))
            return None
        if data is not None:
            self.served_bytes += len(data)
            self._send(asked.peer, Chunk(policy, offset, file.size, file.sha256), [data])
            return None
        if now - asked.told < self._word_s:
            return asked
        self._send(asked.peer, NotYet(policy, offset))
        return asked._replace(told=now)

    def _send(self, peer: str, message: Message, blobs: list[bytes] | None = None) -> None:
        try:
            self._server.send(peer, message, blobs or [])
        except LinkError as error:
            log.info("%s", error)

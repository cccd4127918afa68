"""The answering end of a link: one ROUTER socket, any number of clients, no thread of its own.

Everything happens inside `poll` and `send`. The messages of one burst are acknowledged when the caller comes back
(the next `poll`, or `acknowledge`), so what the caller writes down before that is safe with it when the sender
forgets it. A client is known by (name, epoch); the connection it arrives on is only bound to it, so a reconnect
resumes the session. A connection without a session is anonymous: whatever it sends, but a valid Hello, costs a
counter and at most one short reply.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import zmq

from async_rl.wire.door import Door, key_of, shown
from async_rl.wire.frames import (
    NOBLOCK,
    NOBLOCK_MORE,
    RESEND_HEARTBEATS,
    BadFrame,
    Bye,
    Hello,
    LinkError,
    LinkMessage,
    Payload,
    PeerJoined,
    PeerLost,
    Ping,
    Received,
    Refused,
    Unknown,
    Welcome,
    bind,
    credit_sizes,
    link_frame,
    next_frame,
    payload_of,
    read_envelope,
    read_link_message,
    read_messages,
    receive_frames,
    send_frames,
    set_common_options,
    silence_s,
)
from async_rl.wire.keys import DoorKeys
from async_rl.wire.messages import SCHEMA, Envelope, Message
from async_rl.wire.security import check_endpoint
from async_rl.wire.session import Report, Session, Verdict

BURST_MESSAGES = 128  # frames read per poll (or two a peer): with 16, what a burst costs was felt (15 %)
KEEP_LOST_HEARTBEATS = 60  # how long a lost peer's session waits for it to resume
STRANGERS_BYTES = 4 << 10  # more than any Hello; what is larger is not looked at before its sender has said one
MAX_PEERS = 1 << 14  # far more than anybody has machines
REMEMBERED_REFUSALS = 1024  # disconnected clients that still get to read why
GATHER_S = 0.0003  # under a stream of messages: a burst of one costs nearly as much as a burst of ten
GATHER_LONGEST_S = 0.001  # GATHER_S for each message of the burst before, but no longer: who is alone waits for little
BLOCKED_RETRY_S = 0.002  # a ROUTER cannot wait for room towards one peer
NOTHING = Report(0, 0)

Event = Received | PeerJoined | PeerLost


class _Peer:
    """A client's session, and the connection it is bound to at the moment."""

    __slots__ = (
        "epoch",
        "heard",
        "key",
        "lost",
        "name",
        "own_epoch",
        "progress",
        "role",
        "route",
        "sent",
        "session",
        "silence_s",
    )

    def __init__(self, hello: Hello, key: str, epoch: int, own_epoch: int, window: int, now: float) -> None:
        self.name = hello.name
        self.key = key
        self.role: str = hello.role
        self.epoch = epoch
        self.own_epoch = own_epoch
        self.session: Session[Payload] = Session(window)
        self.route: bytes | None = None
        self.lost = False
        self.silence_s = 0.0
        self.heard = now
        self.sent = now
        self.progress = now


class Server:
    """Bind and serve; with `keys` only whom they list. Raises LinkError when the endpoint is taken, AsyncRLError when
    it is not allowed."""

    def __init__(
        self,
        endpoint: str,
        *,
        run: str,
        token: str,
        name: str,
        heartbeat_s: float = 1.0,
        window_bytes: int = 8 << 20,
        keys: DoorKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, encrypted=keys is not None)
        self.run = run
        self.name = name
        self.keys = keys
        self.counters: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bytes_received = 0
        self._heartbeat_s = heartbeat_s
        self._window = window_bytes
        self._last_epoch = 0
        self._peers: dict[str, _Peer] = {}
        self._routes: dict[bytes, _Peer] = {}
        self._refusals: dict[tuple[str, int], str] = {}
        self._events: list[Event] = []
        self._handled: set[_Peer] = set()  # delivered to the caller, not acknowledged yet
        self._owing: set[_Peer] = set()  # a report may be due to them
        self._ready: set[_Peer] = set()  # credit or a message arrived: try to send
        self._next_sweep = 0.0
        self._returned = 0.0  # when the last burst, no full one, was handed to the caller
        self._gather_s = GATHER_S
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        set_common_options(self._socket, endpoint)
        self._door = Door(self._context, self._socket, self.counters, run=run, token=token, keys=keys)
        try:
            self._endpoint = bind(self._socket, endpoint)
        except LinkError:
            self._door.close()
            self._socket.close()
            self._context.term()
            raise

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that a wildcard became."""
        return self._endpoint

    @property
    def peers(self) -> Mapping[str, str]:
        """Name to role of every client that `send` accepts, those momentarily lost included."""
        return {peer.name: peer.role for peer in self._peers.values()}

    def key_of(self, peer: str) -> str:
        """The public key (Z85) that a client's connection was authenticated with; empty without keys."""
        known = self._peers.get(peer)
        return known.key if known is not None else ""

    # --- what the caller does ----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Event]:
        """Acknowledge the last burst, then return the next one, or [] after `timeout_s`. Events of one peer are in
        order. Nothing that a peer sends makes it raise."""
        self.acknowledge()
        started = time.monotonic()
        deadline = started + timeout_s
        if started - self._returned < self._gather_s:
            time.sleep(min(self._gather_s, timeout_s))
        while True:
            self._drain()
            now = time.monotonic()
            self._maintain(now)
            if self._events:
                events, self._events = self._events, []
                self._returned = now if len(events) < BURST_MESSAGES else 0.0
                self._gather_s = min(len(events) * GATHER_S, GATHER_LONGEST_S)
                return events
            if now >= deadline:
                return []
            self._socket.poll(math.ceil(max(0.0, min(deadline, self._next_due(now)) - now) * 1000))

    def send(self, peer: str, message: Message, blobs: Sequence[bytes | memoryview] = ()) -> None:
        """Queue for a known client, lost for the moment or not, without blocking. Blobs are not copied: leave them
        as they are until they are acknowledged. Raises LinkError for a client that is not known."""
        known = self._peers.get(peer)
        if known is None:
            raise LinkError(
                f"{self.name} at {self.endpoint} has no peer {peer!r} to send {type(message).__name__} to: it left, "
                "was given up, or never joined"
            )
        payload = payload_of(message, blobs)
        known.session.enqueue(payload, payload.size, bool(payload.blobs))
        self._pump(known, time.monotonic())

    def backlog(self, peer: str) -> int:
        """Messages that were sent to a client and are not acknowledged; 0 for one that is not known."""
        known = self._peers.get(peer)
        return known.session.unacknowledged if known is not None else 0

    def acknowledge(self) -> None:
        """Tell the senders that what was delivered so far is safe here."""
        if not self._handled:
            return
        now = time.monotonic()
        for peer in self._handled:
            peer.session.acknowledge(now)
            peer.session.consume(peer.session.unconsumed_bytes, now)
        self._owing |= self._handled
        self._handled.clear()
        self._send_reports(now)

    def disconnect(self, peer: str, reason: str) -> None:
        """Forget a client and tell it why, at once or when it next says hello; no PeerLost follows. Raises LinkError
        for a client that is not known."""
        known = self._peers.get(peer)
        if known is None:
            raise LinkError(f"{self.name} at {self.endpoint} has no peer {peer!r} to disconnect")
        self._refuse_peer(known, reason)

    def close(self, linger_s: float = 1.0) -> None:
        """Say goodbye to all and stop listening; waits at most `linger_s` for the goodbyes to leave."""
        if self._socket.closed:
            return
        for peer in list(self._peers.values()):
            self._send_link(peer, Bye(f"{self.name} is closing"), time.monotonic())
        self._door.close()
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # --- what arrives ------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take in a burst of what has arrived. A ROUTER reads its connections in turn, so every peer that has said
        something is heard in it."""
        now = time.monotonic()
        socket = self._socket
        for _ in range(max(BURST_MESSAGES, 2 * len(self._peers))):
            try:
                route = socket.recv(NOBLOCK)
                head, blobs = receive_frames(socket)  # at least one frame follows the connection's name
            except zmq.Again:
                return
            self._on_frames(route, head, blobs, now)

    def _on_frames(self, route: bytes, head: memoryview, blobs: list[memoryview], now: float) -> None:
        peer = self._routes.get(route)
        self.bytes_received += len(head) + (sum(map(len, blobs)) if blobs else 0)
        if peer is None and (blobs or len(head) > STRANGERS_BYTES):
            # Decoded, it might be a hundred times as large. One that has lost its session says hello when told.
            self._on_stranger(route, self.run, 0)
            return
        try:
            envelope = read_envelope(head, len(blobs))
            if peer is not None and envelope.seq and envelope.epoch == peer.epoch:
                self._on_message(peer, envelope, blobs, now)
            elif envelope.seq:
                self._on_stranger(route, envelope.run, envelope.epoch)
            else:
                self._on_link(route, peer, envelope, head, now)
        except BadFrame as bad:
            self.counters[bad.kind] += 1
            if peer is not None:
                reason = f"{self.name} at {self.endpoint} could not read what {peer.name} sent ({bad.kind})"
                self._lose(peer, f"sent a frame that cannot be read ({bad.kind})")
                self._refuse_peer(peer, reason)

    def _on_message(self, peer: _Peer, envelope: Envelope, blobs: list[memoryview], now: float) -> None:
        self._hear(peer, envelope, now)
        bodies: tuple[msgspec.Raw, ...] = (envelope.body, *envelope.more)
        sizes = credit_sizes(bodies, blobs)
        if not peer.session.accept_all(envelope.seq, sizes):
            verdicts = [peer.session.accept(seq, size, now) for seq, size in enumerate(sizes, envelope.seq)]
            if Verdict.OVERDRAWN in verdicts:
                raise BadFrame("overdrawn")
            bodies = tuple([body for body, verdict in zip(bodies, verdicts, strict=True) if verdict is Verdict.DELIVER])
            self.counters.update(verdict.value for verdict in verdicts if verdict is not Verdict.DELIVER)
            self._owing.add(peer)
        if bodies:
            self._handled.add(peer)
            self._events += [Received(peer.name, message, blobs, peer.role) for message in read_messages(bodies)]

    def _on_stranger(self, route: bytes, run: str, epoch: int) -> None:
        self.counters["unknown_peer" if run == self.run else "wrong_run"] += 1
        self._answer(route, Unknown(epoch, forgotten=False))

    def _on_link(self, route: bytes, peer: _Peer | None, envelope: Envelope, head: memoryview, now: float) -> None:
        if envelope.schema != SCHEMA and peer is None:
            self.counters["wrong_schema"] += 1
            self._answer(
                route,
                Refused(
                    f"{self.name} at {self.endpoint} speaks wire schema {SCHEMA}, {shown(envelope.sender)} speaks "
                    f"{envelope.schema}: install the same version of async-rl on both machines"
                ),
            )
            return
        message = read_link_message(envelope)
        if isinstance(message, Hello):
            self._on_hello(route, envelope, message, key_of(head), now)
        elif peer is None or envelope.epoch != peer.epoch:
            self._on_stranger(route, envelope.run, envelope.epoch)
        elif isinstance(message, Bye):
            self._lose(peer, message.reason, left=True)
            self._forget(peer)
        elif isinstance(message, Ping):
            self._hear(peer, envelope, now)
        else:
            raise BadFrame("out_of_place")

    def _on_hello(self, route: bytes, envelope: Envelope, hello: Hello, key: str, now: float) -> None:
        server = f"{self.name} at {self.endpoint}"
        refusal = self._door.refusal(server, envelope, hello, key) or self._refusal(envelope, hello, key)
        if refusal is not None:
            kind, reason = refusal
            self.counters[kind] += 1
            self._answer(route, Refused(reason))
            return
        peer = self._peers.get(hello.name)
        if peer is not None and (peer.epoch < envelope.epoch or (peer.lost and peer.epoch != envelope.epoch)):
            self._lose(peer, "another client of the same name, started later, took its place")
            self._refuse_peer(peer, f"another client named {peer.name!r}, started later, took this one's place")
            peer = None
        if hello.resume and (peer is None or peer.own_epoch != hello.resume):
            self._answer(route, Unknown(envelope.epoch, forgotten=True))
            return
        if peer is None:
            self._last_epoch = max(self._last_epoch + 1, time.time_ns())
            peer = _Peer(hello, key, envelope.epoch, self._last_epoch, self._window, now)
            self._peers[hello.name] = peer
            self._events.append(PeerJoined(peer.name, peer.role))
        self._bind_route(peer, route)
        peer.silence_s = silence_s(self._heartbeat_s, hello.heartbeat_s)
        self._hear(peer, envelope, now)
        peer.progress = now
        peer.session.rewind(after=hello.received)
        self._send_link(peer, Welcome(peer.epoch, peer.session.received, self._heartbeat_s), now)

    def _refusal(self, envelope: Envelope, hello: Hello, key: str) -> tuple[str, str] | None:
        """As Door.refusal, for what depends on who is here."""
        reason = self._refusals.get((hello.name, envelope.epoch))
        if reason is not None:
            return "refused_before", reason
        peer = self._peers.get(hello.name)
        if peer is None and len(self._peers) >= MAX_PEERS:
            return "too_many", f"{self.name} has {MAX_PEERS} clients already"
        if peer is not None and (peer.role, peer.key) != (hello.role, key):
            # Else whoever may come in as a node could take the trainer's place, or that of a node with another key.
            return "name_taken", f"{hello.name!r} is the name of another client of {self.name}: choose another"
        if peer is not None and peer.epoch > envelope.epoch and not peer.lost:  # else: the clock was set back
            return "name_taken", f"another client named {hello.name!r}, started later, is connected to {self.name}"
        return None

    def _hear(self, peer: _Peer, envelope: Envelope, now: float) -> None:
        peer.heard = now
        if peer.lost:
            peer.lost = False
            self._events.append(PeerJoined(peer.name, peer.role, resumed=True))
        if peer.session.hear(envelope.ack, envelope.limit):
            peer.progress = now
        if peer.session.may_send():
            self._ready.add(peer)

    # --- what leaves -------------------------------------------------------------------------------------------------

    def _pump(self, peer: _Peer, now: float) -> None:
        """Send what credit and socket allow. What the socket refuses is tried again soon."""
        session = peer.session
        if session.in_flight == 0:
            peer.progress = now
        self._ready.discard(peer)
        while peer.route is not None:
            frame = next_frame(self.run, self.name, peer.own_epoch, session)
            if frame is None:
                return
            if not self._send(peer, frame.head, frame.blobs, now):
                session.rewind(after=frame.seq - 1)
                if peer.route is not None:
                    self._ready.add(peer)
                return

    def _send_link(self, peer: _Peer, message: LinkMessage, now: float) -> bool:
        frame = link_frame(self.run, self.name, peer.own_epoch, peer.session.report(), message)
        return self._send(peer, frame, (), now)

    def _send(self, peer: _Peer, head: bytes, blobs: Sequence[bytes | memoryview], now: float) -> bool:
        """False when the socket has no room for this peer, or its connection is gone (then it is unbound)."""
        if peer.route is None:
            return False
        try:
            self._socket.send(peer.route, NOBLOCK_MORE)
            self.bytes_sent += send_frames(self._socket, head, blobs)
        except zmq.Again:
            peer.session.owe(now)
            self._owing.add(peer)
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._routes[peer.route]
            peer.route = None
            return False
        peer.sent = now
        return True

    def _answer(self, route: bytes, message: LinkMessage) -> None:
        """One reply to a connection without a session; lost when there is no room for it."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(route, NOBLOCK_MORE)
            self._socket.send(link_frame(self.run, self.name, 0, NOTHING, message), NOBLOCK)

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def _maintain(self, now: float) -> None:
        for peer in list(self._ready):
            self._pump(peer, now)
        self._send_reports(now)
        # Silence is judged right after a burst was read, so a busy caller does not make its peers look lost.
        if now >= self._next_sweep:
            self._door.count_failures()
            self._next_sweep = now + self._heartbeat_s / 4
            for peer in list(self._peers.values()):
                self._sweep_peer(peer, now)

    def _sweep_peer(self, peer: _Peer, now: float) -> None:
        silent = now - peer.heard
        if peer.lost:
            if silent > KEEP_LOST_HEARTBEATS * self._heartbeat_s:
                self._forget(peer)
            return
        if silent > peer.silence_s:
            self._lose(peer, f"silent for {silent:.1f} s, more than {peer.silence_s:g} s (3 heartbeats)")
            return
        patience = RESEND_HEARTBEATS * self._heartbeat_s
        if peer.session.in_flight and now - peer.progress > patience and peer.heard > peer.progress + patience / 2:
            self.counters["resends"] += 1
            peer.session.rewind(after=peer.session.acknowledged_by_peer)
            peer.progress = now
            self._pump(peer, now)
        if now - peer.sent >= self._heartbeat_s:
            self._send_link(peer, Ping(), now)

    def _send_reports(self, now: float) -> None:
        for peer in list(self._owing):
            due = peer.session.report_due()
            if due is not None and due > now:
                continue
            self._owing.discard(peer)
            if due is not None:
                self._send_link(peer, Ping(), now)

    def _next_due(self, now: float) -> float:
        due = self._next_sweep
        if self._ready:
            due = min(due, now + BLOCKED_RETRY_S)
        for peer in self._owing:
            due = min(due, peer.session.report_due() or now)
        return due

    def _bind_route(self, peer: _Peer, route: bytes) -> None:
        if peer.route is not None:
            self._routes.pop(peer.route, None)
        before = self._routes.pop(route, None)
        if before is not None and before is not peer:
            before.route = None
        peer.route = route
        self._routes[route] = peer

    def _lose(self, peer: _Peer, reason: str, left: bool = False) -> None:
        """Report it once; the session is kept for a while, and so is the connection, in case it only paused."""
        if not peer.lost:
            peer.lost = True
            self._events.append(PeerLost(peer.name, peer.role, reason, left))

    def _refuse_peer(self, peer: _Peer, reason: str) -> None:
        route = peer.route
        self._forget(peer)
        self._refusals[peer.name, peer.epoch] = reason
        while len(self._refusals) > REMEMBERED_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        if route is not None:  # last: who reads the reason finds it forgotten
            self._answer(route, Refused(reason))

    def _forget(self, peer: _Peer) -> None:
        if peer.route is not None:
            self._routes.pop(peer.route, None)
            peer.route = None
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        for group in (self._handled, self._owing, self._ready):
            group.discard(peer)

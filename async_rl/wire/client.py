"""The dialling end of a link: a DEALER socket behind a lock, a thread that looks after it, and a thread-safe face.

Callers send by themselves: handing each message to a thread costs two switches, more than sending it. So everything
here, the socket included, is touched only under one lock. The thread waits for the socket's file descriptor and for
the clock: it reads what arrives, says hello, beats, reports, and sends what had to wait for credit or room. libzmq
raises the descriptor once and takes it down again whenever anybody uses the socket; so who has used it looks whether
something came meanwhile, or else nobody would. While callers do so again and again, two threads at work would only take
the lock and the interpreter from each other, which costs more than sending does: the thread rests then. Every HOLD_S
it sees whether the callers still look after the socket, and takes over when they do not.

    connecting -- Welcome --> connected -- silent, or Unknown --> connecting -- Welcome --> connected ...
        any --> failed: Refused, Bye, silent for lost_after_s; every later call raises that error
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from async_rl.wire.dealer import Bell, dealer, watching
from async_rl.wire.frames import (
    RESEND_HEARTBEATS,
    BadFrame,
    Bye,
    Hello,
    LinkClosed,
    LinkError,
    LinkMessage,
    LinkRefused,
    LinkTimeout,
    Payload,
    Ping,
    Received,
    Refused,
    Unknown,
    Welcome,
    credit_size,
    link_frame,
    next_frame,
    payload_of,
    read_envelope,
    read_link_message,
    read_messages,
    receive_frames,
    send_frames,
    silence_s,
)
from async_rl.wire.keys import DialKeys, hint
from async_rl.wire.messages import COALESCE_BYTES, Envelope, Message, Role
from async_rl.wire.security import check_endpoint
from async_rl.wire.session import Session, Verdict

BURST_MESSAGES = 64  # read before looking at the other direction
HOLD_S = 0.005  # how long a small message waits for company while others are under way
LOOK_S = 0.001  # a caller that sends and sends looks this often for what has come: a look costs a system call
EVENTS, POLLIN, POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)  # plain: an enum's operators are slow


class Client:
    """`name` is this side's, unique among the server's clients; `peer` is what messages call the other side ("the
    buffer"). With `inbox`, received messages go there (and count as consumed at once), and so does the LinkError when
    the link is lost for good. Silent for three heartbeats: it says hello again every heartbeat, for `lost_after_s`
    seconds. Raises AsyncRLError for an endpoint that is not allowed."""

    def __init__(
        self,
        endpoint: str,
        *,
        run: str,
        token: str,
        role: Role,
        name: str,
        peer: str,
        heartbeat_s: float = 1.0,
        window_bytes: int = 8 << 20,
        inbox: queue.SimpleQueue[Any] | None = None,
        lost_after_s: float = 30.0,
        keys: DialKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, encrypted=keys is not None)
        self.endpoint = endpoint
        self.name = name
        self.peer = peer
        self.run = run
        self.bytes_sent = 0
        self.bytes_received = 0
        self.bad_frames = 0
        self.sessions = 0
        """Sessions so far: it rises when the server is a new one that knows nothing of what was said before."""
        self._token = token
        self._keys = keys
        self._role: Role = role
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s(heartbeat_s, heartbeat_s)
        self._lost_after_s = lost_after_s
        self._max_unsent_bytes = window_bytes
        self._inbox = inbox
        self._arrived: queue.SimpleQueue[tuple[Received, int, Session[Payload]] | None] = queue.SimpleQueue()
        # All that follows, the socket included, is touched under this lock alone.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._session: Session[Payload] = Session(window_bytes)
        self._connected = False
        self._failure: LinkError | None = None
        self._waiting = 0  # callers that wait for a change
        self._wakes_at = 0.0  # when the thread looks by itself; in the past while it is awake, or woken
        self._epoch = time.time_ns()
        self._server_epoch = 0
        self._heard = self._sent = self._progress = self._next_hello = 0.0
        self._blocked = False  # the socket has no room
        self._holding = False  # a message was left to the thread since it last looked
        self._used = False  # a caller has used the socket since the thread last looked
        self._resting = False  # the thread leaves the socket to the callers
        self._looked = 0.0  # when somebody last saw to what has come
        self._due = 0.0  # when the thread has something to do whatever the callers do
        self._closing = False
        self._linger_s = 0.0
        self._context = zmq.Context()
        self._socket = dealer(self._context, endpoint, keys)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name=f"link {name} to {peer}", daemon=True)

    # --- what callers do ---------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Wait for the server's welcome. Raises LinkRefused, or LinkTimeout (it goes on trying: call again;
        but where our key is refused libzmq dials no more)."""
        if not self._thread.is_alive() and self._failure is None:
            self._heard = time.monotonic()
            self._thread.start()
        with self._lock:
            if not self._wait_until(lambda: self._connected, timeout_s):
                strange = f" ({self.bad_frames} answers were not async-rl's)" if self.bad_frames else ""
                raise LinkTimeout(
                    f"{self.name} waited {timeout_s:g} s for a welcome from {self.peer} at {self.endpoint}, there was "
                    f"none{strange}: is it running, and is this its endpoint? {hint(self._keys, self._role)}"
                )

    def send(self, message: Message, blobs: Sequence[bytes | memoryview] = (), timeout_s: float = 30.0) -> None:
        """Queue for sending, in order. Blobs are not copied: leave them as they are until `flush`. Waits while more
        than a window of bytes is unsent; raises LinkTimeout, or the error that ended the link."""
        payload = payload_of(message, blobs)
        with self._lock:
            if self._failure is not None or self._session.unsent_bytes > self._max_unsent_bytes:
                self._wait_for_room(payload.kind, timeout_s)
            session = self._session
            idle = not session.in_flight
            session.enqueue(payload, payload.size, bool(payload.blobs))
            if not self._connected or self._blocked:
                return
            if idle or session.unsent_bytes >= COALESCE_BYTES:
                self._send_waiting()
            else:
                self._holding = True
                if self._wakes_at > time.monotonic() + HOLD_S:
                    self._wake()

    def receive(self, timeout_s: float, awaiting: str) -> Received:
        """The next message. `awaiting` is for people: "a batch". Raises LinkTimeout, or the error that ended the link
        once everything that arrived before it was received."""
        if self._arrived.empty():
            with self._lock:
                self._send_waiting()
                self._rely_on_thread()
        try:
            return self._next_arrived(timeout_s)
        except queue.Empty:
            state = "" if self._connected else ", which does not answer at present"
            raise LinkTimeout(
                f"{self.name} waited {timeout_s:g} s for {awaiting} from {self.peer} at {self.endpoint}{state}"
            ) from None

    def poll(self) -> Received | None:
        """The next message if one has arrived; raises the error that ended the link."""
        return None if self._arrived.empty() else self._next_arrived(0.0)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent is acknowledged. Raises LinkTimeout, or the error that ended the link."""
        with self._lock:
            self._send_waiting()
            if not self._wait_until(lambda: not self._session.unacknowledged, timeout_s):
                raise LinkTimeout(
                    f"{self.name} waited {timeout_s:g} s for {self.peer} at {self.endpoint} to acknowledge "
                    f"{self._session.unacknowledged} messages"
                )

    def close(self, timeout_s: float = 2.0) -> None:
        """Give what was sent up to `timeout_s` to be acknowledged, then say goodbye. Safe to call twice."""
        deadline = time.monotonic() + timeout_s
        if self._thread.is_alive():
            with contextlib.suppress(LinkError):
                self.flush(timeout_s if self._connected else 0.0)
            self._linger_s = max(0.1, deadline - time.monotonic())
            self._closing = True
            self._wake()
            self._thread.join(timeout_s + 1.0)
        with self._lock:
            self._fail(LinkClosed(f"{self.name} has closed its link to {self.peer} at {self.endpoint}"), False)
        if not self._thread.is_alive() and not self._context.closed:
            self._socket.close()
            self._context.term()
            self._bell.close()

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """With the lock held: wait for `condition`; raises the link's failure."""
        self._waiting += 1
        self._rely_on_thread()
        self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_s)
        self._waiting -= 1
        if self._failure is not None and not condition():
            raise self._copy_of_failure()
        return condition()

    def _wait_for_room(self, kind: str, timeout_s: float) -> None:
        """With the lock held, but not while waiting. Who waits for credit looks for it, and sends what it is for: the
        thread would have to be woken for that, and would then have to wake this one."""
        deadline = time.monotonic() + timeout_s
        attending = watching(self._descriptor)
        while self._failure is None and self._session.unsent_bytes > self._max_unsent_bytes // 2:
            now = time.monotonic()
            if now >= deadline:
                raise LinkTimeout(
                    f"{self.name} waited {timeout_s:g} s for {self.peer} at {self.endpoint} to take in more: "
                    f"{self._session.unsent_bytes} bytes are queued before this {kind}"
                )
            self._used = self._connected and not self._blocked
            if self._used and self._look(now):
                continue
            self._lock.release()
            try:
                attending.poll(math.ceil(min(HOLD_S, deadline - now) * 1000))
            finally:
                self._lock.acquire()
        if self._failure is not None:
            raise self._copy_of_failure()

    def _next_arrived(self, timeout_s: float) -> Received:
        if self._inbox is not None:
            raise ValueError("this client delivers to its inbox: wait there")
        item = self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait()
        if item is None:
            self._arrived.put(None)
            raise self._copy_of_failure()
        received, size, session = item
        with self._lock:
            now = time.monotonic()
            session.consume(size, now)  # of the session it came in, which may have ended since
            due = session.report_due()
            if due is not None and due < self._wakes_at and session is self._session:
                self._wake()
        return received

    def _copy_of_failure(self) -> LinkError:
        assert self._failure is not None
        return type(self._failure)(str(self._failure))

    def _wake(self) -> None:
        self._wakes_at = 0.0
        self._bell.ring()

    def _rely_on_thread(self) -> None:
        """With the lock held: this caller will wait, and no longer look after the socket."""
        self._used = False
        if self._resting:
            self._resting = False
            self._wake()

    def _send_waiting(self) -> None:
        """In a caller's thread, with the lock: send what waits for company. Whoever uses the socket has to look whether
        something came meanwhile (libzmq takes down the descriptor that the thread waits for), or to see to it that the
        thread will soon look by the clock."""
        if self._blocked or not self._connected or not self._session.unsent_bytes:
            return
        now = time.monotonic()
        if self._session.may_send():
            self._pump(now)
        self._used = True
        looks = now - self._looked >= LOOK_S
        more = looks and self._look(now)
        due = self._session.report_due()
        unseen = not looks and not self._resting and self._wakes_at > now + HOLD_S
        if more or unseen or self._blocked or (due is not None and due < self._wakes_at):
            self._wake()

    def _look(self, now: float) -> bool:
        """Take in what has come, and send what it has made room for; True when there is more."""
        self._looked = now
        more = self._drain()
        if self._connected and not self._blocked and self._session.may_send():
            self._pump(now)
        return more

    def _events(self) -> int:
        """POLLIN, POLLOUT or both: what the socket has or has room for now."""
        return int(self._socket.getsockopt(EVENTS))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._lock:
                self._socket.connect(self.endpoint)
            bell = self._bell.fileno()
            resting, attending = watching(bell), watching(bell, self._descriptor)
            while self._failure is None and not self._closing:
                with self._lock:
                    wait_s = HOLD_S if self._left_to_callers() else self._work()
                    poller = resting if self._resting else attending
                if wait_s > 0 and bell in dict(poller.poll(math.ceil(wait_s * 1000))):
                    self._bell.quiet()
            with self._lock:
                if self._connected and self._closing:
                    self._send_link(Bye(f"{self.name} said goodbye"), time.monotonic())
        except Exception as error:  # whatever it is, nobody may be left waiting for this thread
            with self._lock:
                self._fail(LinkClosed(f"the link of {self.name} to {self.peer} at {self.endpoint} broke: {error!r}"))
        finally:
            with self._lock:
                self._connected = False
                self._socket.close(linger=int(self._linger_s * 1000))

    def _left_to_callers(self) -> bool:
        """Nobody has called for the thread, and the callers have looked after the socket since it last asked."""
        now, report_due = time.monotonic(), self._session.report_due()
        owing = report_due is not None and report_due <= now
        if owing or self._holding or self._blocked or not self._connected:
            return False
        if not (self._resting and self._used and 0.0 < self._wakes_at <= now < self._due):
            return False
        self._used = False
        self._wakes_at = now + HOLD_S
        return True

    def _work(self) -> float:
        """All that is to be done now; returns for how many seconds there will be nothing, unless something comes."""
        self._drain()
        if self._blocked and self._events() & POLLOUT:
            self._blocked = False
        now = time.monotonic()
        self._upkeep(now)
        if self._connected and not self._blocked:
            self._pump(now)
        events = self._events()
        if events & POLLIN or (self._blocked and events & POLLOUT):
            return 0.0
        self._looked = now
        self._due = self._wakes_at = self._next_due(now)
        self._resting = self._used and not self._waiting and not self._blocked
        self._used = False
        if self._resting:
            self._wakes_at = min(self._wakes_at, now + HOLD_S)
        return self._wakes_at - now

    def _next_due(self, now: float) -> float:
        if not self._connected:
            return now + self._heartbeat_s if self._blocked else self._next_hello
        silent = self._heard + self._silence_s
        if self._blocked:  # nothing can leave until the socket has room
            return silent
        due = min(silent, self._sent + self._heartbeat_s)
        if (report_due := self._session.report_due()) is not None:
            due = min(due, report_due)
        if self._holding:  # who held back a message just now will do so again
            self._holding = False
            due = min(due, now + HOLD_S)
        return due

    def _drain(self) -> bool:
        """Take in a burst of what has arrived; False when that was all."""
        for _ in range(BURST_MESSAGES):
            if not self._events() & POLLIN:  # cheaper than what a refused read raises
                return False
            try:
                head, blobs = receive_frames(self._socket)
            except zmq.Again:
                return False
            self.bytes_received += len(head) + sum(map(len, blobs))
            try:
                self._on_frames(head, blobs)
            except BadFrame as bad:
                self.bad_frames += 1
                if bad.kind == "undecodable_body":
                    self._fail(LinkClosed(f"{self.peer} at {self.endpoint} sent {self.name} a message it cannot read"))
        return True

    def _on_frames(self, head: memoryview, blobs: list[memoryview]) -> None:
        envelope = read_envelope(head, len(blobs))
        now = time.monotonic()
        if envelope.seq == 0:
            self._on_link(envelope, read_link_message(envelope), now)
        elif envelope.epoch == self._server_epoch:
            self._on_message(envelope, blobs, now)

    def _on_message(self, envelope: Envelope, blobs: list[memoryview], now: float) -> None:
        self._hear(envelope, now)
        session = self._session
        for seq, body in enumerate((envelope.body, *envelope.more), envelope.seq):
            size = credit_size(len(body), blobs)
            if session.accept(seq, size, now) is not Verdict.DELIVER:
                continue
            session.acknowledge(now)
            received = Received(envelope.sender, read_messages((body,))[0], blobs)
            if self._inbox is not None:
                session.consume(size, now)
                self._inbox.put(received)
            else:
                self._arrived.put((received, size, session))

    def _on_link(self, envelope: Envelope, message: LinkMessage, now: float) -> None:
        known = envelope.epoch == self._server_epoch and self._server_epoch != 0
        match message:
            case Welcome(client_epoch=epoch) if epoch == self._epoch and (known or self._server_epoch == 0):
                self._on_welcome(envelope, message, now)
            case Refused(reason=reason):
                self._fail(LinkRefused(f"{self.name} was refused: {reason}"))
            case Unknown(forgotten=False) if self._connected:
                self._say_hello_from_now_on(now)
            case Unknown(client_epoch=epoch, forgotten=True) if epoch == self._epoch and not self._connected:
                self._start_afresh()
            case Ping() if known:
                self._hear(envelope, now)
            case Bye(reason=reason) if known:
                self._fail(LinkClosed(f"{self.peer} at {self.endpoint} said goodbye: {reason}"))

    def _on_welcome(self, envelope: Envelope, welcome: Welcome, now: float) -> None:
        self._hear(envelope, now)
        if self._connected:
            return  # the answer to a hello that was repeated
        if self._server_epoch == 0:
            self._server_epoch = envelope.epoch
            self.sessions += 1
        self._silence_s = silence_s(self._heartbeat_s, welcome.heartbeat_s)
        self._progress = now
        self._blocked = False
        self._session.rewind(after=welcome.received)
        self._connected = True
        self._changed.notify_all()

    def _say_hello_from_now_on(self, now: float) -> None:
        self._connected = False
        self._next_hello = now

    def _start_afresh(self) -> None:
        """The server does not know our session: number again, from 1, what it may not have."""
        self._session = self._session.renumbered()
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._server_epoch = 0
        self._next_hello = 0.0

    def _hear(self, envelope: Envelope, now: float) -> None:
        self._heard = now
        if self._session.hear(envelope.ack, envelope.limit):
            self._progress = now
            if self._waiting and not self._session.unacknowledged:
                self._changed.notify_all()

    def _upkeep(self, now: float) -> None:
        """Hello, heartbeat, report, silence and resending, each when its time has come."""
        silent = now - self._heard
        if self._connected and silent > self._silence_s:
            self._say_hello_from_now_on(now)
        if not self._connected:
            if self.sessions and silent > self._lost_after_s:
                self._fail(LinkClosed(f"{self.name} lost {self.peer} at {self.endpoint}: silent for {silent:.0f} s"))
            elif now >= self._next_hello and not self._blocked:
                hello = Hello(
                    self._role, self.name, self._token, self._server_epoch, self._session.received, self._heartbeat_s
                )
                if self._send_link(hello, now):
                    self._next_hello = now + self._heartbeat_s
            return
        patience = RESEND_HEARTBEATS * self._heartbeat_s
        if self._session.in_flight == 0:
            self._progress = now
        elif now - self._progress > patience and self._heard > self._progress + patience / 2:
            self._session.rewind(after=self._session.acknowledged_by_peer)
            self._progress = now
        due = self._session.report_due()
        if not self._blocked and (now - self._sent >= self._heartbeat_s or (due is not None and due <= now)):
            self._send_link(Ping(), now)

    def _pump(self, now: float) -> None:
        """Send what credit and room allow."""
        session = self._session
        while (frame := next_frame(self.run, self.name, self._epoch, session)) is not None:
            if not self._send(frame.head, frame.blobs, now):
                session.rewind(after=frame.seq - 1)
                return

    def _send_link(self, message: LinkMessage, now: float) -> bool:
        return self._send(link_frame(self.run, self.name, self._epoch, self._session.report(), message), (), now)

    def _send(self, head: bytes, blobs: Sequence[bytes | memoryview], now: float) -> bool:
        try:
            self.bytes_sent += send_frames(self._socket, head, blobs)
        except zmq.Again:
            self._blocked = True
            self._session.owe(now)
            return False
        self._sent = now
        return True

    def _fail(self, failure: LinkError, tell_inbox: bool = True) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        self._connected = False
        self._changed.notify_all()
        self._arrived.put(None)
        if tell_inbox and self._inbox is not None:
            self._inbox.put(failure)
        self._wake()

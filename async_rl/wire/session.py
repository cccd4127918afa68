"""One session of a link: numbering, acknowledgement, resend and credit, as a pure state machine.

Both directions between two peers, for one pair of epochs. No socket, clock or thread: the shells (client.py,
server.py) feed it what arrived and the time, and send what it hands out.

Outgoing message k (from 1) occupies the bytes [offset_k, offset_k + size_k) of the stream. It may be sent once
offset_k < limit, the total that the receiver has granted; so one message larger than the whole window still passes.
Acknowledgement and limit are running totals: losing, repeating or reordering the envelopes that carry them does no
harm. What is sent is kept until it is acknowledged, and sent again from the first missing message on (go-back-N).

Life of a message, window 100, sizes 60:

    enqueue 1, 2, 3     offsets 0, 60, 120        limit 100: 1 and 2 may go, 3 must wait
    receiver consumes 1 limit = 60 + 100 = 160    3 may go
    2 is lost           3 arrives: a gap, not delivered; the receiver still reports ack 1
    rewind(after=1)     2 and 3 are sent again    ack 3: nothing is kept any more

What enforces what: `accept` delivers in order and exactly once (the guarantee), and refuses what exceeds the credit
(the guarantee, for the receiver's memory); `take` keeps an honest sender within it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import msgspec

P = TypeVar("P")

# Report to the sender after this many messages, a quarter of the window, or this long, whichever comes first. Fewer
# reports cost throughput; without the time rule a small window stalls (measured at 1.9k messages/s).
REPORT_MESSAGES = 128
REPORT_WINDOW_SHARE = 4
REPORT_SECONDS = 0.005


class Verdict(Enum):
    """What to do with an incoming message; only DELIVER changes the session."""

    DELIVER = "deliver"
    DUPLICATE = "duplicate"
    GAP = "gap"
    OVERDRAWN = "overdrawn"


class Outgoing(msgspec.Struct, Generic[P], frozen=True, gc=False):
    """`alone`: it shares its frame with no other message. (No tuple: these are made and dropped by the thousand, and
    would each be looked at by the cycle collector.)"""

    seq: int
    offset: int
    size: int
    payload: P
    alone: bool


class Report(NamedTuple):
    """What rides on every envelope: the last message acknowledged, and the bytes granted, both in total."""

    ack: int
    limit: int


class Session(Generic[P]):
    """`window` is the credit in bytes that this side grants beyond what it has consumed."""

    def __init__(self, window: int) -> None:
        self.window = window
        # Outgoing: acknowledged | sent, kept for resending | unsent.
        self._sent: deque[Outgoing[P]] = deque()
        self._unsent: deque[Outgoing[P]] = deque()
        self._last_seq = 0
        self._stream_bytes = 0
        self._limit = 0
        self.acknowledged_by_peer = 0
        self.unsent_bytes = 0
        # Incoming.
        self.received = 0
        self._received_bytes = 0
        self._consumed_bytes = 0
        self._acknowledged = 0
        self._reported = Report(0, 0)
        self._owed_since: float | None = None

    # --- outgoing ----------------------------------------------------------------------------------------------------

    def enqueue(self, payload: P, size: int, alone: bool = False) -> int:
        """Give the message its number and its place in the stream; returns the number."""
        self._last_seq += 1
        self._unsent.append(Outgoing(self._last_seq, self._stream_bytes, size, payload, alone))
        self._stream_bytes += size
        self.unsent_bytes += size
        return self._last_seq

    def take(self, room: int) -> list[Outgoing[P]]:
        """What goes out next as one frame, now counted as sent: the next message, and those after it that fit into
        `room` bytes with it; as far as the credit allows."""
        unsent, sent, limit = self._unsent, self._sent, self._limit
        taken: list[Outgoing[P]] = []
        start = end = unsent[0].offset if unsent else 0
        while unsent:
            message = unsent[0]
            if message.offset >= limit:
                break
            if taken and (message.alone or taken[0].alone or message.offset + message.size > start + room):
                break
            taken.append(unsent.popleft())
            sent.append(message)
            end = message.offset + message.size
        self.unsent_bytes -= end - start
        return taken

    def may_send(self) -> bool:
        return bool(self._unsent) and self._unsent[0].offset < self._limit

    def hear(self, ack: int, limit: int) -> bool:
        """Take in a report of the peer. True when it acknowledged something new. Old reports change nothing; an
        acknowledgement of what was never numbered is ignored whole."""
        if ack > self._last_seq:
            return False
        if limit > self._limit:
            self._limit = limit
        if ack <= self.acknowledged_by_peer:
            return False
        self.acknowledged_by_peer = ack
        while self._sent and self._sent[0].seq <= ack:
            self._sent.popleft()
        while self._unsent and self._unsent[0].seq <= ack:  # rewound while its acknowledgement was under way
            self.unsent_bytes -= self._unsent.popleft().size
        return True

    def rewind(self, after: int) -> None:
        """Send again everything that was sent with a number above `after`."""
        while self._sent and self._sent[-1].seq > after:
            message = self._sent.pop()
            self._unsent.appendleft(message)
            self.unsent_bytes += message.size

    def renumbered(self) -> Session[P]:
        """A fresh session that carries what this one has not seen acknowledged, in order, numbered from 1."""
        fresh: Session[P] = Session(self.window)
        for message in (*self._sent, *self._unsent):
            fresh.enqueue(message.payload, message.size, message.alone)
        return fresh

    @property
    def in_flight(self) -> int:
        """Messages sent and not acknowledged."""
        return len(self._sent)

    @property
    def unacknowledged(self) -> int:
        """Messages not acknowledged, sent or not."""
        return len(self._sent) + len(self._unsent)

    # --- incoming ----------------------------------------------------------------------------------------------------

    def accept(self, seq: int, size: int, now: float) -> Verdict:
        """Judge an incoming message of `size` bytes; on DELIVER it counts as received. A duplicate means that the
        peer missed our report, so another becomes due."""
        if seq == self.received + 1:
            if self._received_bytes >= self._reported.limit:
                return Verdict.OVERDRAWN
            self.received = seq
            self._received_bytes += size
            return Verdict.DELIVER
        if seq > self.received:
            return Verdict.GAP
        self.owe(now)
        return Verdict.DUPLICATE

    def accept_all(self, seq: int, sizes: Sequence[int]) -> bool:
        """Messages of `sizes`, numbered from `seq` on, arrived in one frame. True when `accept` would say DELIVER to
        each of them, and they count as received; else nothing has changed, and they are to be judged one by one."""
        total = sum(sizes)
        if seq != self.received + 1 or self._received_bytes + total - sizes[-1] >= self._reported.limit:
            return False
        self.received += len(sizes)
        self._received_bytes += total
        return True

    def acknowledge(self, now: float) -> None:
        """Everything received so far is safe with this side; the peer may forget it."""
        if self._acknowledged != self.received:
            self._acknowledged = self.received
            self.owe(now)

    def consume(self, size: int, now: float) -> None:
        """`size` received bytes have left this side's queue, so as many may come in again."""
        if size:
            self._consumed_bytes += size
            self.owe(now)

    @property
    def unconsumed_bytes(self) -> int:
        return self._received_bytes - self._consumed_bytes

    def report(self) -> Report:
        """The report to put on an envelope that is about to be sent; nothing is owed after it. (Without anything owed
        it is the last one: made anew only when it changed.)"""
        if self._owed_since is not None or not self._reported.limit:
            self._owed_since = None
            self._reported = Report(self._acknowledged, self._consumed_bytes + self.window)
        return self._reported

    def report_due(self) -> float | None:
        """When a report must go out at the latest, on the clock of `now`; None when nothing is owed."""
        if self._owed_since is None:
            return None
        granted = self._consumed_bytes + self.window - self._reported.limit
        if self._acknowledged - self._reported.ack >= REPORT_MESSAGES or (
            granted * REPORT_WINDOW_SHARE >= self.window and granted > 0
        ):
            return self._owed_since
        return self._owed_since + REPORT_SECONDS

    def owe(self, now: float) -> None:
        """A report must go out: there is something to say, or the last one did not leave."""
        if self._owed_since is None:
            self._owed_since = now

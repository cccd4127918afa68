"""What the two ends of a link share: the link's own messages, framing, errors and events.

On the wire a message is one frame with an `Envelope`, then `blobs` raw frames. The link's own messages (below) have
sequence number 0; a client is anonymous to the server until its Hello was welcomed.
"""

from __future__ import annotations

import socket as unix
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from async_rl.errors import AsyncRLError
from async_rl.trajectory import Packed
from async_rl.wire.messages import (
    COALESCE_BYTES,
    MAGIC,
    SCHEMA,
    Batch,
    Envelope,
    Message,
    Results,
    Role,
    decode_body,
    encode_body,
)
from async_rl.wire.session import Report, Session

MAX_FRAME_BYTES = 1 << 30  # libzmq hangs up on a peer that announces more, before it allocates anything
ZERO_COPY_BYTES = 512 << 10  # below this, copying a frame is cheaper than waking the thread that ends its sharing
HIGH_WATER_MESSAGES = 1000  # per direction and peer, in libzmq; the credit is the real bound
MESSAGE_OVERHEAD_BYTES = 64  # charged per message, so that empty messages use up credit too
SILENT_HEARTBEATS = 3  # a peer not heard for this long is taken for lost
MAX_HEARTBEAT_S = 60.0  # what a peer may ask for
RESEND_HEARTBEATS = 2  # unacknowledged for this long by a peer that does talk: send again


class LinkError(AsyncRLError):
    """Base of the link's errors; the message names the peer, the endpoint and what was awaited."""


class LinkTimeout(LinkError):
    """The wait is over, the link may still be good."""


class LinkRefused(LinkError):
    """The peer does not want us, and said why."""


class LinkClosed(LinkError):
    """The peer said goodbye, or is lost for good, or this side closed the link."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """`blobs` are views into the received frames; copy what must outlive them cheaply. `role` is what the peer said it
    is when it joined; empty at a client, which knows whom it dialled."""

    peer: str
    message: Any
    blobs: list[memoryview]
    role: str = ""


class PeerJoined(NamedTuple):
    """Also when a lost peer resumes its session (`resumed`)."""

    peer: str
    role: str
    resumed: bool = False


class PeerLost(NamedTuple):
    """`left`: it said goodbye, and will not resume its session."""

    peer: str
    role: str
    reason: str
    left: bool = False


class Payload(msgspec.Struct, frozen=True, gc=False):
    """An outgoing message as it is kept until acknowledged: encoded once, trajectories and blobs by reference. The
    body is what `parts`, buffers all of them, make when joined."""

    kind: str
    parts: Sequence[Any]
    blobs: tuple[bytes | memoryview, ...]
    size: int


# --- the link's own messages -----------------------------------------------------------------------------------------


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """Base; run, schema, client epoch, acknowledgement and credit are in the envelope around it."""


class Hello(LinkMessage, frozen=True, array_like=True, tag=str.lower):
    """`resume` is the server's epoch of the session to go on with (0: a new session), `received` the last sequence
    number that arrived from it in order. Both ends use the longer of their heartbeats to judge silence."""

    role: Role
    name: str
    token: str
    resume: int
    received: int
    heartbeat_s: float


class Welcome(LinkMessage, frozen=True, array_like=True, tag=str.lower):
    """Answers the Hello of `client_epoch`; the envelope's epoch names the session. `received` is the last sequence
    number that arrived in order, acknowledged or not: the client goes on after it."""

    client_epoch: int
    received: int
    heartbeat_s: float


class Refused(LinkMessage, frozen=True, array_like=True, tag=str.lower):
    reason: str


class Unknown(LinkMessage, frozen=True, array_like=True, tag=str.lower):
    """No session is bound to this connection: say hello. `forgotten`: the session of `client_epoch` does not exist
    here (any more), so what it had not acknowledged must be numbered afresh."""

    client_epoch: int
    forgotten: bool


class Ping(LinkMessage, frozen=True, array_like=True, tag=str.lower):
    """Carries nothing but its envelope's acknowledgement and credit."""


class Bye(LinkMessage, frozen=True, array_like=True, tag=str.lower):
    reason: str


RESULTS_HEAD = encode_body(Results(()))[:-1]  # up to the announcement of its trajectories
ALONE, WITH_MORE = b"\x9b", b"\x9c"  # an Envelope of 11 fields (blobs the last), and of 12
NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # plain: an enum's own operators are slow

_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_link_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Hello | Welcome | Refused | Unknown | Ping | Bye)


class BadFrame(Exception):
    """A frame that is not ours; `kind` is the name it is counted under."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def payload_of(message: Message, blobs: Sequence[bytes | memoryview]) -> Payload:
    """Encode once. Raises TypeError for a blob that is not contiguous bytes."""
    views = tuple(blob if isinstance(blob, bytes) else memoryview(blob).cast("B") for blob in blobs) if blobs else ()
    parts, nbytes = body_parts(message)
    return Payload(type(message).__name__, parts, views, credit_size(nbytes, views))


def body_parts(message: Message) -> tuple[list[Any], int]:
    """`encode_body` in parts, and their bytes: the trajectories of a message, its last field, are not copied."""
    if isinstance(message, Results):
        fields = RESULTS_HEAD
    elif isinstance(message, Batch):
        fields = encode_body(msgspec.structs.replace(message, trajectories=()))[:-1]
    else:
        body = encode_body(message)
        return [body], len(body)
    fields += array_head(len(message.trajectories))
    parts: list[Any] = [fields]
    nbytes = len(fields)
    for trajectory in message.trajectories:
        nbytes += len(trajectory)
        if isinstance(trajectory, Packed):
            parts += trajectory.parts
        else:
            parts.append(trajectory)
    return parts, nbytes


def credit_sizes(bodies: Sequence[msgspec.Raw], blobs: Sequence[bytes | memoryview]) -> list[int]:
    """`credit_size` of each message of a frame."""
    return [credit_size(len(bodies[0]), blobs)] if blobs else [MESSAGE_OVERHEAD_BYTES + len(body) for body in bodies]


def credit_size(body_bytes: int, blobs: Sequence[bytes | memoryview]) -> int:
    """What a message costs in credit; both ends must agree, so only parts that a resend does not change count."""
    size = MESSAGE_OVERHEAD_BYTES + body_bytes
    return size + sum(map(len, blobs)) if blobs else size


class Sending(NamedTuple):
    """One frame, with the blobs that follow it, and the number of the first message in it."""

    seq: int
    head: bytes
    blobs: tuple[bytes | memoryview, ...]


def next_frame(run: str, sender: str, epoch: int, session: Session[Payload]) -> Sending | None:
    """Take from the session what goes out next as one frame: a message, and small ones after it up to COALESCE_BYTES.
    None when there is nothing to send, or no credit for it."""
    taken = session.take(COALESCE_BYTES)
    if not taken:
        return None
    seq, payload = taken[0].seq, taken[0].payload
    more = [message.payload for message in taken[1:]]
    return Sending(seq, head_frame(run, sender, epoch, seq, session.report(), payload, more), payload.blobs)


def head_frame(
    run: str, sender: str, epoch: int, seq: int, report: Report, payload: Payload, more: Sequence[Payload] = ()
) -> bytes:
    """The first frame of a pool's messages: an Envelope, put together so that each body is copied once."""
    fields = _encoder.encode((MAGIC, SCHEMA, run, sender, epoch, seq, report.ack, report.limit, payload.kind))[1:]
    blobs = _encoder.encode(len(payload.blobs))
    if not more:
        return b"".join((ALONE, fields, *payload.parts, blobs))
    parts = [part for one in more for part in one.parts]
    return b"".join((WITH_MORE, fields, *payload.parts, blobs, array_head(len(more)), *parts))


def array_head(count: int) -> bytes:
    """How msgpack announces an array."""
    return bytes((0x90 | count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")


def link_frame(run: str, sender: str, epoch: int, report: Report, message: LinkMessage) -> bytes:
    """The only frame of a message of the link's own."""
    kind = type(message).__name__.lower()
    body = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(Envelope(MAGIC, SCHEMA, run, sender, epoch, 0, report.ack, report.limit, kind, body))


def read_envelope(frame: bytes | memoryview, n_blobs: int) -> Envelope:
    """Raises BadFrame; the body stays undecoded."""
    try:
        envelope = _envelope_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadFrame("undecodable") from None
    if envelope.magic != MAGIC:
        raise BadFrame("wrong_magic")
    if envelope.blobs != n_blobs or (n_blobs and envelope.more):
        raise BadFrame("wrong_blobs")
    return envelope


def read_link_message(envelope: Envelope) -> Any:
    """Raises BadFrame."""
    try:
        return _link_decoder.decode(envelope.body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadFrame("undecodable") from None


def read_messages(bodies: Sequence[msgspec.Raw]) -> list[Any]:
    """Raises BadFrame."""
    try:
        return [decode_body(body) for body in bodies]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadFrame("undecodable_body") from None


def silence_s(own_heartbeat_s: float, peer_heartbeat_s: float) -> float:
    """Seconds without a sign of life after which a peer is taken for lost: it may beat more slowly than we do."""
    return SILENT_HEARTBEATS * max(own_heartbeat_s, min(peer_heartbeat_s, MAX_HEARTBEAT_S))


# --- sockets ---------------------------------------------------------------------------------------------------------


def set_common_options(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)


def send_frames(socket: zmq.Socket[bytes], head: bytes, blobs: Sequence[bytes | memoryview]) -> int:
    """Send one multi-part message without blocking and return its bytes; raises zmq.Again when there is no room (then
    nothing was sent)."""
    size = len(head)
    socket.send(head, NOBLOCK_MORE if blobs else NOBLOCK, copy=size < ZERO_COPY_BYTES)
    last = len(blobs) - 1
    for index, blob in enumerate(blobs):
        flags = NOBLOCK if index == last else NOBLOCK_MORE
        if (frame := as_it_came(blob)) is not None:
            socket.send(frame, flags, copy=False)
        else:
            socket.send(blob, flags, copy=len(blob) < ZERO_COPY_BYTES)
        size += len(blob)
    return size


def as_it_came(blob: bytes | memoryview) -> zmq.Frame | None:
    """The received frame that a blob is a view of, if it is all of it: libzmq counts who still needs its memory, so it
    is sent on for the price of a counter."""
    if isinstance(blob, bytes) or not isinstance(blob.obj, zmq.Frame) or len(blob.obj) != len(blob):
        return None
    return blob.obj


def receive_frames(socket: zmq.Socket[bytes]) -> tuple[memoryview, list[memoryview]]:
    """One multi-part message without blocking, as views of libzmq's own memory: its first frame and the others.
    Raises zmq.Again when there is none."""
    frame = socket.recv(NOBLOCK, copy=False)
    head, blobs = frame.buffer, []
    while frame.more:
        frame = socket.recv(NOBLOCK, copy=False)
        blobs.append(frame.buffer)
    return head, blobs


def bind(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Bind and return the actual endpoint; raises LinkError."""
    advice = (
        "another run may still use it: stop that one, or set another endpoint (tcp://127.0.0.1:* takes any free port)"
    )
    if endpoint.startswith("ipc://") and _is_served(endpoint.removeprefix("ipc://")):
        # libzmq would take the path away from the server that listens there.
        raise LinkError(f"cannot listen on {endpoint}: address already in use; {advice}")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        what = "address already in use; " + advice if error.errno == zmq.EADDRINUSE else error.strerror
        raise LinkError(f"cannot listen on {endpoint}: {what}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _is_served(path: str) -> bool:
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0

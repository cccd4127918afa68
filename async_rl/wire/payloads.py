"""Encoded trajectories inside messages: small ones in the message, large ones as frames of their own behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from async_rl.trajectory import EncodedTrajectory, Packed
from async_rl.wire.messages import COALESCE_BYTES

BLOB_BYTES = 1 << 20  # what is larger travels as a frame of its own
VIEWED_BYTES = 8 << 10  # what is smaller is copied out of its message when it is kept
INLINE_BYTES = 64 << 20  # of payloads in one message; libzmq refuses frames far above

AS_THEY_ARE = (Packed, msgspec.Raw)  # made once: what `Packed | msgspec.Raw` makes each time costs more than the test
NIL = msgspec.Raw(b"\xc0")  # msgpack's nil: stands for a payload that follows as a blob


def coalesce(packed: Sequence[Packed]) -> list[list[Packed]]:
    """Split into messages of about COALESCE_BYTES: joining small ones pays, larger messages do not (measured). Nothing
    is encoded for that, as what can be bundled will be encoded otherwise."""
    batches: list[list[Packed]] = []
    room = 0
    for data in packed:
        size = data.about_nbytes
        if size > room or not batches:
            batches.append([])
            room = COALESCE_BYTES
        batches[-1].append(data)
        room -= size
    return batches


def pack_payloads(
    payloads: Sequence[EncodedTrajectory | Packed],
) -> tuple[tuple[msgspec.Raw, ...], list[bytes | memoryview]]:
    """Encoded trajectories as (inside the message, blobs): those above BLOB_BYTES, and all from the point where the
    message would pass INLINE_BYTES, are NIL inside and follow as blobs, in order. What was packed in pieces stays so
    inside: the link puts it together when the message leaves, and nobody looks at it before."""
    inline: list[Any] = []
    blobs: list[bytes | memoryview] = []
    total = 0
    for payload in payloads:
        size = len(payload)
        total += size
        if size > BLOB_BYTES or total > INLINE_BYTES:
            inline.append(NIL)
            blobs.append(_as_blob(payload))
        else:
            inline.append(payload if isinstance(payload, AS_THEY_ARE) else msgspec.Raw(payload))
    return tuple(inline), blobs


def _as_blob(payload: EncodedTrajectory | Packed) -> bytes | memoryview:
    if isinstance(payload, Packed):
        return payload.joined()
    return memoryview(payload) if isinstance(payload, msgspec.Raw) else payload


def unpack_payloads(
    inline: Sequence[msgspec.Raw], blobs: Sequence[bytes | memoryview]
) -> Sequence[EncodedTrajectory]:
    """The payloads again, in order. Raises ValueError when the blobs are not as many as the message says."""
    if not blobs and NIL not in inline:
        return inline
    left = list(blobs)[::-1]
    out: list[EncodedTrajectory] = []
    for raw in inline:
        if raw != NIL:
            out.append(raw)
        elif left:
            out.append(left.pop())
        else:
            raise ValueError("a trajectory is said to follow as a frame of its own, and none is left")
    if left:
        raise ValueError(f"{len(left)} frames follow that the message does not speak of")
    return out


def to_keep(payloads: Sequence[EncodedTrajectory]) -> list[EncodedTrajectory]:
    """The payloads of one message as they may be held for long. From VIEWED_BYTES on they stay where they arrived:
    copying them into memory that nobody has touched for long takes half of a service's time. But a view keeps the whole
    frame, for which nobody accounts. What travels in one frame was finished together, so it also leaves together,
    nearly, and such a frame is small; of a message that is larger only what is most of it stays."""
    total = sum(map(len, payloads)) if len(payloads) > 1 else 0
    copied_below = VIEWED_BYTES if total <= 2 * COALESCE_BYTES else total // 2
    return [each if len(each) >= copied_below else bytes(each) for each in payloads]

"""Encoded trajectories inside messages: small ones in the message, large ones as frames of their own behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

BLOB_BYTES = 1 << 20  # what is larger travels as a frame of its own
INLINE_BYTES = 64 << 20  # of payloads in one message; libzmq refuses frames far above

NIL = msgspec.Raw(b"\xc0")  # msgpack's nil: stands for a payload that follows as a blob


def pack_payloads(
    payloads: Sequence[bytes | memoryview],
) -> tuple[tuple[msgspec.Raw, ...], list[bytes | memoryview]]:
    """Encoded trajectories as (inside the message, blobs): those above BLOB_BYTES, and all from the point where the
    message would pass INLINE_BYTES, are NIL inside and follow as blobs, in order."""
    inline, blobs, total = [], [], 0
    for payload in payloads:
        total += len(payload)
        if len(payload) > BLOB_BYTES or total > INLINE_BYTES:
            inline.append(NIL)
            blobs.append(payload)
        else:
            inline.append(msgspec.Raw(payload))
    return tuple(inline), blobs


def unpack_payloads(
    inline: Iterable[msgspec.Raw], blobs: Iterable[bytes | memoryview]
) -> list[msgspec.Raw | bytes | memoryview]:
    """The payloads again, in order. Raises ValueError when the blobs are not as many as the message says."""
    left = list(blobs)[::-1]
    out: list[msgspec.Raw | bytes | memoryview] = []
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

"""Everything that decodes what a peer sent, fed with any bytes: it reads them or refuses them in its own words."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from async_rl.bundle import opened, trajectories_of
from async_rl.trajectory import TrajectoryError, check_arrays, check_trajectory, decode_trajectory, segment_arrays
from async_rl.version import token_versions
from async_rl.wire.frames import BadFrame, read_envelope, read_link_message, read_messages
from async_rl.wire.payloads import unpack_payloads
from buffer.arrivals import read_attempt, read_bundle


def decode_all(data: bytes) -> None:
    """Raises what no decoder may."""
    with suppress(BadFrame):
        envelope = read_envelope(data, 0)
        with suppress(BadFrame):
            read_link_message(envelope)
        with suppress(BadFrame):
            read_messages((envelope.body, *envelope.more))
    with suppress(BadFrame):
        for message in read_messages((msgspec.Raw(data),)):
            for name in ("trajectories", "prefixes"):
                if hasattr(message, name):
                    with suppress(ValueError):
                        unpack_payloads(getattr(message, name), [b"blob"])
    read_attempt("node", memoryview(data), 1 << 16)
    read_bundle("node", memoryview(data), 1 << 16, 8)
    with suppress(msgspec.MsgspecError, ValueError, RecursionError, TrajectoryError):
        for trajectory in trajectories_of(data):
            check_trajectory(trajectory, 1000)
    with suppress(msgspec.MsgspecError, ValueError, RecursionError, TrajectoryError):
        for attempt in opened(data):
            if not attempt.problem:
                check_arrays(attempt.trajectory, attempt.segments, 1000)
    with suppress(msgspec.MsgspecError, ValueError, RecursionError, TrajectoryError):
        trajectory = decode_trajectory(data)
        check_trajectory(trajectory, 1000)
        for header, arrays in zip(trajectory.segments, segment_arrays(trajectory), strict=True):
            assert len(arrays.tokens) == header.n_tokens <= len(data)
            assert len(token_versions(header.versions)) <= header.n_tokens

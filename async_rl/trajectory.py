"""Trajectories: what an inference node produces for one attempt, packed for the wire.

The unit is the *attempt* (lease, sample). Its trajectory has 1..n segments, usually one; a rewritten context starts
another. All per-token arrays of all segments lie back to back in one binary field, so that the buffer can hold and
forward a trajectory without looking inside, and the receiver gets views instead of copies:

    for each segment:  token ids int32[n] | log-probabilities float32[n] | mask uint8[n] | each extra, in header order

No struct here is a concern of the garbage collector: none can be part of a cycle, and there are several a trajectory.
All numbers are little-endian. `check_trajectory` compares every declared size with the bytes that are there, before
anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.version import VersionRun, tokens_of

Finish = Literal["stop", "length", "abort"]
Status = Literal["ok", "env_failed", "aborted"]

# Only plain numeric dtypes may cross the wire: anything else (object, void) could execute or alias memory.
EXTRA_DTYPES = frozenset({"|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"})
IDS, LOGPROBS, MASK = np.dtype("<i4"), np.dtype("<f4"), np.dtype("|u1")
BYTES_PER_TOKEN = 4 + 4 + 1
LARGEST_VERSION = (1 << 31) - 1  # versions of tokens are int32 arrays
MAX_SEGMENTS = 32  # of an attempt: room is kept for their headers where an attempt may have several
MAX_EXTRA_DIMENSIONS = 8  # far below numpy's own limit, at which a view cannot be made


class MaskReason(IntEnum):
    """Why a token does not train; 0 means it was sampled by the model and does."""

    SAMPLED = 0
    PROMPT = 1
    ENVIRONMENT = 2
    TEMPLATE = 3
    STALE = 4
    TRUNCATED = 5


class TrajectoryError(AsyncRLError):
    """A trajectory that contradicts itself or cannot train; the message names the attempt."""


class Extra(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An optional named per-token array: `dtype` is a numpy type string of EXTRA_DTYPES, `shape` starts with n."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class SegmentHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a segment's arrays mean. `versions` covers its sampled tokens (mask 0) in order."""

    n_tokens: int
    finish: Finish
    versions: tuple[VersionRun, ...]
    extras: tuple[Extra, ...] = ()

    @property
    def nbytes(self) -> int:
        nbytes = self.n_tokens * BYTES_PER_TOKEN
        return nbytes + sum(extra.nbytes for extra in self.extras) if self.extras else nbytes


class PositionReward(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reward earned at one token: index of the segment, position within it, value."""

    segment: int
    position: int
    value: float


class Timings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds spent by this attempt on the node: waiting for a slot, sampling, scoring."""

    queued_s: float = 0.0
    sampling_s: float = 0.0
    scoring_s: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One attempt's outcome. `arrays` is a view into the received frame (or bytes when built here).

    `status` "ok" carries segments and a reward; "env_failed" (the environment or the reward failed: never reward 0)
    and "aborted" carry neither, but for an aborted one that is handed over: it has the segment sampled so far."""

    lease: int
    sample: int
    status: Status
    reward: float
    segments: tuple[SegmentHeader, ...]
    arrays: memoryview
    components: dict[str, float] = {}
    position_rewards: tuple[PositionReward, ...] = ()
    node: str = ""
    engine: str = ""
    timings: Timings = Timings()
    note: str = ""
    policy_name: str = "main"

    @property
    def attempt(self) -> str:
        """The attempt's name in messages: lease/sample."""
        return f"{self.lease}/{self.sample}"

    @property
    def n_tokens(self) -> int:
        if len(self.segments) == 1:
            return self.segments[0].n_tokens
        return sum([segment.n_tokens for segment in self.segments])

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        """Version runs over the sampled tokens of all segments."""
        if len(self.segments) == 1:
            return self.segments[0].versions
        return tuple([run for segment in self.segments for run in segment.versions])


class SegmentArrays(msgspec.Struct, frozen=True, gc=False):
    """Views of one segment: tokens int32[n], logprobs float32[n] (0 where not sampled), mask uint8[n], extras. (A
    struct, as it is made in a quarter of the time that a tuple with names takes.)"""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint8]
    extras: dict[str, npt.NDArray[Any]]


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A segment before packing: arrays of equal length n, and the header's other fields."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint8]
    versions: tuple[VersionRun, ...]
    finish: Finish
    extras: Mapping[str, npt.NDArray[Any]] = {}


def pack_segments(segments: Sequence[Segment]) -> tuple[tuple[SegmentHeader, ...], memoryview]:
    """Headers and the one binary field of `Trajectory`."""
    headers, parts = lay_out(segments)
    return headers, memoryview(b"".join(parts))


def lay_out(segments: Sequence[Segment]) -> tuple[tuple[SegmentHeader, ...], list[Any]]:
    """As pack_segments, but the binary field is left in pieces that lie back to back in it (numpy arrays, for the most
    part those of the segments): for `Packed`, which copies them when they are sent."""
    headers = []
    parts: list[Any] = []  # arrays: mypy does not know that they are buffers
    for segment in segments:
        parts += (_plain(segment.tokens, IDS), _plain(segment.logprobs, LOGPROBS), _plain(segment.mask, MASK))
        extras: tuple[Extra, ...] = ()
        for name, array in segment.extras.items():
            extras += (Extra(name, array.dtype.str, tuple(array.shape)),)
            parts.append(np.ascontiguousarray(array))
        headers.append(SegmentHeader(len(segment.tokens), segment.finish, segment.versions, extras))
    return tuple(headers), parts


def _plain(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`array` itself where it lies in memory as it travels (nearly always, and numpy's own test costs as much as the
    packing), else a copy that does."""
    return array if array.dtype is dtype and array.flags.c_contiguous else np.ascontiguousarray(array, dtype)


def segment_arrays(trajectory: Trajectory) -> list[SegmentArrays]:
    """Views of every segment, without copying. Call `check_header` first on anything from a peer."""
    out = []
    view, data, offset = np.frombuffer, trajectory.arrays, 0
    for header in trajectory.segments:
        n = header.n_tokens
        tokens = view(data, IDS, n, offset)
        logprobs = view(data, LOGPROBS, n, offset + 4 * n)
        mask = view(data, MASK, n, offset + 8 * n)
        offset += n * BYTES_PER_TOKEN
        extras: dict[str, npt.NDArray[Any]] = {}
        for extra in header.extras:
            array = view(data, extra.dtype, math.prod(extra.shape), offset)
            extras[extra.name] = array.reshape(extra.shape)
            offset += array.nbytes
        out.append(SegmentArrays(tokens, logprobs, mask, extras))
    return out


def check_header(trajectory: Trajectory) -> None:
    """Sizes, shapes, dtypes and counts against the bytes present; costs no allocation. Raises TrajectoryError."""
    if trajectory.status == "ok":
        if not trajectory.segments:
            raise TrajectoryError(f"attempt {trajectory.attempt}: no segments")
        if not math.isfinite(trajectory.reward):
            raise TrajectoryError(f"attempt {trajectory.attempt}: reward is {trajectory.reward}")
    declared = 0
    for header in trajectory.segments:
        if header.n_tokens < 1:
            raise TrajectoryError(f"attempt {trajectory.attempt}: a segment of {header.n_tokens} tokens")
        sampled = 0
        for run in header.versions:
            if run.count < 1 or not 0 <= run.version <= LARGEST_VERSION:
                raise TrajectoryError(
                    f"attempt {trajectory.attempt}: a version run with a count below 1, or a version that is none"
                )
            sampled += run.count
        if sampled > header.n_tokens:
            raise TrajectoryError(
                f"attempt {trajectory.attempt}: {header.n_tokens} tokens in a segment, {sampled} version stamps"
            )
        if header.extras:
            if len({extra.name for extra in header.extras}) < len(header.extras):
                raise TrajectoryError(f"attempt {trajectory.attempt}: two extras of one name")
            for extra in header.extras:
                _check_extra(trajectory.attempt, header.n_tokens, extra)
        declared += header.nbytes
    if declared != trajectory.arrays.nbytes:
        raise TrajectoryError(
            f"attempt {trajectory.attempt}: {declared} bytes declared, {trajectory.arrays.nbytes} received"
        )


def _check_extra(attempt: str, n_tokens: int, extra: Extra) -> None:
    if extra.dtype not in EXTRA_DTYPES:
        raise TrajectoryError(f"attempt {attempt}: extra {extra.name!r} has dtype {extra.dtype!r}")
    # A dimension of 0 would let another be as large as it likes without a byte being there.
    fits = 1 <= len(extra.shape) <= MAX_EXTRA_DIMENSIONS and min(extra.shape) >= 1
    if not fits or extra.shape[0] != n_tokens:
        raise TrajectoryError(f"attempt {attempt}: extra {extra.name!r} has shape {extra.shape}")


def check_trajectory(trajectory: Trajectory, vocabulary_size: int | None = None) -> None:
    """`check_header`, then `check_arrays`. Raises TrajectoryError naming the attempt."""
    check_header(trajectory)
    check_arrays(trajectory, segment_arrays(trajectory), vocabulary_size)


def check_arrays(
    trajectory: Trajectory, segments: Sequence[SegmentArrays], vocabulary_size: int | None = None
) -> None:
    """Token ids are in the vocabulary (when its size is given), and every sampled token has a token before it, a
    version, and a finite log-probability that is at most 0. Raises TrajectoryError naming the attempt."""
    for index, (header, arrays) in enumerate(zip(trajectory.segments, segments, strict=True)):
        tokens = arrays.tokens
        if tokens.min() < 0 or (vocabulary_size is not None and tokens.max() >= vocabulary_size):
            raise TrajectoryError(
                f"attempt {trajectory.attempt}, segment {index}: token ids from {tokens.min()} to {tokens.max()} are "
                f"not all in the vocabulary of {vocabulary_size}"
            )
        sampled = arrays.mask == MaskReason.SAMPLED
        stamped = tokens_of(header.versions)
        if int(sampled.sum()) != stamped:
            raise TrajectoryError(
                f"attempt {trajectory.attempt}, segment {index}: {int(sampled.sum())} sampled tokens, "
                f"{stamped} version stamps"
            )
        if sampled[0]:
            raise TrajectoryError(
                f"attempt {trajectory.attempt}, segment {index}: its first token is marked as sampled, but there is "
                "no prompt token before it"
            )
        logprobs = arrays.logprobs[sampled]
        # The log of a probability that rounds to 1 may come out a hair above 0 in float32.
        if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
            raise TrajectoryError(
                f"attempt {trajectory.attempt}, segment {index}: a behaviour log-probability is missing, "
                "not finite or positive"
            )


EncodedTrajectory = bytes | memoryview | msgspec.Raw
"""What `encode_trajectory` makes, or a bundle of several (async_rl.bundle), as it is held and passed on."""

FIELDS = bytes((0x90 | len(Trajectory.__struct_fields__),))  # how msgpack announces as many

HEAD_BYTES = 256  # all but its arrays, roughly

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Trajectory)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """One msgpack object; the arrays are a single binary field."""
    return _encoder.encode(trajectory)


class Packed(msgspec.Struct, eq=False, gc=False):
    """A trajectory to be sent, encoded when it is, in pieces, the arrays by reference: joined, they are what
    `encode_trajectory` makes. A copy of arrays that nobody has touched for a while costs ten times one of what lies in
    the cache; so they are copied once, into the message, at the moment in which that leaves. Leave them as they are
    until it is acknowledged. `pieces` stand for the trajectory's arrays where these were not joined (see lay_out)."""

    trajectory: Trajectory
    pieces: Sequence[Any] = ()
    _made: tuple[list[Any], int] | None = None

    @property
    def lease(self) -> int:
        """Says which shard of the buffer it is for."""
        return self.trajectory.lease

    @property
    def parts(self) -> list[Any]:
        return self._encoded()[0]

    def __len__(self) -> int:
        return self._encoded()[1]

    @property
    def about_nbytes(self) -> int:
        """Nearly its length, for who has to know before anything is encoded."""
        nbytes: int = sum([piece.nbytes for piece in self._arrays])
        return HEAD_BYTES + nbytes

    def joined(self) -> bytes:
        return b"".join(self.parts)

    @property
    def _arrays(self) -> Sequence[Any]:
        return self.pieces or (self.trajectory.arrays,)

    def _encoded(self) -> tuple[list[Any], int]:
        """The pieces and their bytes."""
        if self._made is None:
            arrays = self._arrays
            nbytes = sum([piece.nbytes for piece in arrays])
            head, tail = self._head() + bin_head(nbytes), self._tail()
            self._made = [head, *arrays, tail], len(head) + nbytes + len(tail)
        return self._made

    def _head(self) -> bytes:
        """All that comes before the arrays, but for their announcement."""
        of = self.trajectory
        return FIELDS + _encoder.encode((of.lease, of.sample, of.status, of.reward, of.segments))[1:]

    def _tail(self) -> bytes:
        of = self.trajectory
        last = (of.components, of.position_rewards, of.node, of.engine, of.timings, of.note, of.policy_name)
        return _encoder.encode(last)[1:]


def bin_head(nbytes: int) -> bytes:
    """How msgpack announces binary data."""
    if nbytes < 1 << 8:
        return b"\xc4" + nbytes.to_bytes(1, "big")
    return b"\xc5" + nbytes.to_bytes(2, "big") if nbytes < 1 << 16 else b"\xc6" + nbytes.to_bytes(4, "big")


def decode_trajectory(data: EncodedTrajectory) -> Trajectory:
    """The reverse, with `arrays` a view into `data`. Raises msgspec.ValidationError on a wrong structure."""
    return _decoder.decode(data)

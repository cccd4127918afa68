"""Bundles: attempts of one lease that travel, wait and are lent together, by columns instead of one after the other.

What a small trajectory costs on its way is its Python objects, not its bytes, and most of these there are once for all
that are sent, checked, kept and lent as one. A node bundles what of a lease is finished at the same time and alike:
good, in one segment, all of it sampled under one policy, with nothing but the three plain arrays. Whatever differs
travels alone, as an encoded Trajectory; and where the attempts of a bundle have to be told apart (one is refused, or
not owed), it is taken apart into these. A payload is one or the other: `trajectories_of` reads both.

The arrays lie by columns too, so that a reader views each column once, and only cuts it:

    token ids int32 of all attempts, back to back in their order | their log-probabilities float32 | their masks uint8
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import gt
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from async_rl.trajectory import (
    BYTES_PER_TOKEN,
    IDS,
    LARGEST_VERSION,
    LOGPROBS,
    MASK,
    EncodedTrajectory,
    Finish,
    Packed,
    SegmentArrays,
    SegmentHeader,
    Timings,
    Trajectory,
    TrajectoryError,
    bin_head,
    check_header,
    decode_trajectory,
    encode_trajectory,
    segment_arrays,
)
from async_rl.version import VersionRun

TAG = "columns"  # "bundle" had the arrays of an attempt together
MAX_ATTEMPTS = 1 << 10  # of a bundle
EMPTY = memoryview(b"")
ALONE_BYTES, COMPONENT_BYTES = 128, 8  # by which numbers may grow that a bundle wrote sparingly: see largest_alone

Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
Shared = Annotated[str, Meta(max_length=200)]  # each attempt alone has it again
Column = Meta(min_length=1, max_length=MAX_ATTEMPTS)


class Named(msgspec.Struct, frozen=True, array_like=True, tag=TAG, gc=False):
    """How a Bundle begins: which attempts it is of."""

    lease: Annotated[int, Meta(ge=0)]
    samples: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 16)], ...], Column]


class Bundle(Named, frozen=True, array_like=True, tag=TAG, gc=False):
    """`samples` rise. Each column has an entry for each of them; `components` and `timings` may be empty instead: then
    nobody has any. `sampled` are how many tokens of `n_tokens` the model sampled, all of version and digest. `arrays`
    is a view into the received frame, or bytes."""

    version: Annotated[int, Meta(ge=0, le=LARGEST_VERSION)]
    digest: Shared
    rewards: Annotated[tuple[float, ...], Column]
    n_tokens: Annotated[tuple[Tokens, ...], Column]
    sampled: Annotated[tuple[Tokens, ...], Column]
    finishes: Annotated[tuple[Finish, ...], Column]
    components: Annotated[tuple[dict[str, float], ...], Meta(max_length=MAX_ATTEMPTS)]
    timings: Annotated[tuple[Timings, ...], Meta(max_length=MAX_ATTEMPTS)]
    node: Shared
    engine: Shared
    policy_name: Shared
    arrays: memoryview


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Bundle)
_name_decoder = msgspec.msgpack.Decoder(Named)
# A Bundle's first bytes: as many fields, and its tag. A Trajectory has a number there.
HEAD = bytes((0x90 | (len(Bundle.__struct_fields__) + 1),)) + _encoder.encode(TAG)
NO_ARRAYS = len(bin_head(0))
NO_COMPONENTS: dict[str, float] = {}
NO_TIMINGS = Timings()


def is_bundle(payload: EncodedTrajectory) -> bool:
    """Whether an encoded payload is a bundle: if not, it should be a trajectory."""
    return bytes(memoryview(payload)[: len(HEAD)]) == HEAD


def decode_bundle(payload: EncodedTrajectory) -> Bundle:
    """With `arrays` a view into `payload`. Raises msgspec.ValidationError on a wrong structure."""
    return _decoder.decode(payload)


def names_in(payload: EncodedTrajectory) -> Named:
    """Whose bundle it is; the rest is not looked at. Raises msgspec.ValidationError."""
    return _name_decoder.decode(payload)


def attempts_in(payload: EncodedTrajectory) -> int:
    """How many attempts a payload is of. Raises msgspec.ValidationError where it is none."""
    return len(names_in(payload).samples) if is_bundle(payload) else 1


def rise(samples: Sequence[int]) -> bool:
    """Whether they are in order, each once."""
    return sorted(set(samples)) == list(samples)


def largest_alone(bundle: Bundle, nbytes: int) -> int:
    """The most bytes that one of its attempts takes alone, of a bundle that is encoded in `nbytes`: its arrays, and all
    that is no array here."""
    grown = ALONE_BYTES + COMPONENT_BYTES * max(map(len, bundle.components), default=0)
    return nbytes - bundle.arrays.nbytes + grown + max(bundle.n_tokens) * BYTES_PER_TOKEN


def is_sound(bundle: Bundle) -> bool:
    """What `check_header` asks of each trajectory, asked of all at once: whether the columns fit each other and the
    bytes. Of one that is not sound `unbundled` gives the attempts, each to be judged for itself, or says why not."""
    tokens, count = bundle.n_tokens, len(bundle.samples)
    return (
        len(bundle.rewards) == len(tokens) == len(bundle.sampled) == len(bundle.finishes) == count
        and len(bundle.components) in (0, count)
        and len(bundle.timings) in (0, count)
        and rise(bundle.samples)
        and not any(map(gt, bundle.sampled, tokens))
        and all(map(math.isfinite, bundle.rewards))
        and sum(tokens) * BYTES_PER_TOKEN == bundle.arrays.nbytes
    )


def _headers(bundle: Bundle) -> Iterator[Trajectory]:
    """Each attempt as a trajectory of its own, but without its arrays. The columns must be equally long."""
    count = len(bundle.samples)
    rows = zip(
        bundle.samples, bundle.rewards, bundle.n_tokens, bundle.sampled, bundle.finishes,
        bundle.components or (NO_COMPONENTS,) * count, bundle.timings or (NO_TIMINGS,) * count, strict=True,
    )  # fmt: skip
    lease, version, digest, node, engine = bundle.lease, bundle.version, bundle.digest, bundle.node, bundle.engine
    policy_name = bundle.policy_name
    for sample, reward, n_tokens, sampled, finish, components, timings in rows:
        header = SegmentHeader(n_tokens, finish, (VersionRun(version, digest, sampled),))
        yield Trajectory(
            lease, sample, "ok", reward, (header,), EMPTY, components, (), node, engine, timings, "", policy_name
        )


def unbundled(bundle: Bundle) -> Iterator[Trajectory]:
    """Each attempt as a trajectory of its own. Raises TrajectoryError when the columns are not equally long, or not
    as long as their bytes; what else may be wrong with them is then wrong with the trajectories, for `check_header` to
    find."""
    count, total, arrays = len(bundle.samples), sum(bundle.n_tokens), bundle.arrays
    full = (bundle.rewards, bundle.n_tokens, bundle.sampled, bundle.finishes)
    may_be_empty = (bundle.components, bundle.timings)
    if {*map(len, full)} != {count} or {*map(len, may_be_empty)} - {0, count}:
        raise TrajectoryError(f"lease {bundle.lease}: a bundle of {count} attempts with columns of other lengths")
    if total * BYTES_PER_TOKEN != arrays.nbytes:
        raise TrajectoryError(
            f"lease {bundle.lease}: a bundle with {arrays.nbytes} bytes of arrays declares {total * BYTES_PER_TOKEN}"
        )
    tokens, logprobs, masks = arrays[: 4 * total], arrays[4 * total : 8 * total], arrays[8 * total :]
    start = 0
    for header, n_tokens in zip(_headers(bundle), bundle.n_tokens, strict=True):
        end = start + n_tokens
        own = tokens[4 * start : 4 * end], logprobs[4 * start : 4 * end], masks[start:end]
        start = end
        yield msgspec.structs.replace(header, arrays=memoryview(b"".join(own)))


class Opened(msgspec.Struct, frozen=True, gc=False):
    """An attempt as it is read for training: its segments' arrays, and `trajectory` for all the rest (whose `arrays`
    may be empty). `problem` says what is wrong with an attempt; then it has no segments' arrays."""

    trajectory: Trajectory
    segments: Sequence[SegmentArrays]
    problem: str = ""


def opened(payload: EncodedTrajectory) -> list[Opened]:
    """All attempts of a payload, with headers that fit their bytes (see `check_header`), or a problem. Raises
    msgspec.ValidationError on a wrong structure, and TrajectoryError as `unbundled`."""
    if not is_bundle(payload):
        return [_opened(decode_trajectory(payload))]
    bundle = decode_bundle(payload)
    return cut(bundle) if is_sound(bundle) else [_opened(trajectory) for trajectory in unbundled(bundle)]


def cut(bundle: Bundle) -> list[Opened]:
    """The attempts of a bundle that `is_sound`."""
    data, total = bundle.arrays, sum(bundle.n_tokens)
    tokens = np.frombuffer(data, IDS, total)
    logprobs = np.frombuffer(data, LOGPROBS, total, 4 * total)
    masks = np.frombuffer(data, MASK, total, 8 * total)
    out, start = [], 0
    for trajectory, n_tokens in zip(_headers(bundle), bundle.n_tokens, strict=True):
        end = start + n_tokens
        arrays = SegmentArrays(tokens[start:end], logprobs[start:end], masks[start:end], {})
        out.append(Opened(trajectory, (arrays,)))
        start = end
    return out


def _opened(trajectory: Trajectory) -> Opened:
    try:
        check_header(trajectory)
    except TrajectoryError as error:
        return Opened(trajectory, (), str(error))
    return Opened(trajectory, segment_arrays(trajectory))


def trajectories_of(payload: EncodedTrajectory) -> list[Trajectory]:
    """All attempts of a payload, each as one that came alone. Raises as `opened`."""
    return list(unbundled(decode_bundle(payload))) if is_bundle(payload) else [decode_trajectory(payload)]


def taken_apart(payload: EncodedTrajectory) -> list[bytes]:
    """A bundle's attempts, each encoded for itself. Raises as `trajectories_of`."""
    return [encode_trajectory(trajectory) for trajectory in unbundled(decode_bundle(payload))]


def _alike(of: Trajectory) -> tuple[Any, ...]:
    """Attempts for which this is the same may travel together. It is empty where a bundle has no room for something of
    the attempt: that travels alone."""
    if of.status != "ok" or len(of.segments) != 1 or of.note or of.position_rewards:
        return ()
    (header,) = of.segments
    if len(header.versions) != 1 or header.extras:
        return ()
    (run,) = header.versions
    return of.lease, run.version, run.digest, of.policy_name


def bundled(packed: Sequence[Packed]) -> list[Packed]:
    """The same attempts, all of one node, with those bundled that may be."""
    alike: dict[tuple[Any, ...], list[Packed]] = {}
    out: list[Packed] = []
    for each in packed:
        key = _alike(each.trajectory)
        if key:
            alike.setdefault(key, []).append(each)
        else:
            out.append(each)
    for own in alike.values():
        out += [_bundle(own)] if 1 < len(own) <= MAX_ATTEMPTS else own
    return out


def _bundle(attempts: list[Packed]) -> PackedBundle:
    attempts.sort(key=_sample)
    pieces = [piece for each in attempts for piece in _pieces(each)]
    return PackedBundle(attempts[0].trajectory, pieces[::3] + pieces[1::3] + pieces[2::3], attempts=attempts)


def _sample(packed: Packed) -> int:
    return packed.trajectory.sample


def _pieces(packed: Packed) -> Sequence[Any]:
    """Token ids, log-probabilities and mask of an attempt of one segment."""
    if packed.pieces:
        return packed.pieces
    arrays, n = packed.trajectory.arrays, packed.trajectory.n_tokens
    return arrays[: 4 * n], arrays[4 * n : 8 * n], arrays[8 * n :]


class PackedBundle(Packed):
    """Of attempts that are alike; `trajectory` is the first of them."""

    attempts: Sequence[Packed] = ()

    def _head(self) -> bytes:
        first, rows = self.trajectory, [_row(packed.trajectory) for packed in self.attempts]
        samples, rewards, n_tokens, sampled, finishes, components, timings = zip(*rows, strict=True)
        run = first.segments[0].versions[0]
        bundle = Bundle(
            first.lease, samples, run.version, run.digest, rewards, n_tokens, sampled, finishes,
            () if components.count(NO_COMPONENTS) == len(rows) else components,
            () if timings.count(NO_TIMINGS) == len(rows) else timings,
            first.node, first.engine, first.policy_name, EMPTY,
        )  # fmt: skip
        return _encoder.encode(bundle)[:-NO_ARRAYS]

    def _tail(self) -> bytes:
        return b""


def _row(of: Trajectory) -> tuple[Any, ...]:
    header = of.segments[0]
    return of.sample, of.reward, header.n_tokens, header.versions[0].count, header.finish, of.components, of.timings

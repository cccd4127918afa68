"""Packing and its reverse, and what a header from a hostile peer may not do."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from async_rl.trajectory import (
    BYTES_PER_TOKEN,
    EXTRA_DTYPES,
    Extra,
    MaskReason,
    Packed,
    PositionReward,
    Segment,
    SegmentHeader,
    Timings,
    Trajectory,
    TrajectoryError,
    check_header,
    check_trajectory,
    decode_trajectory,
    encode_trajectory,
    lay_out,
    pack_segments,
    segment_arrays,
)
from async_rl.version import VersionRun

D1, D2 = "1" * 64, "2" * 64


@st.composite
def segments(draw: Any) -> Segment:
    """A prompt token, then any mix of sampled and other tokens; any extras."""
    mask = np.array([MaskReason.PROMPT, *draw(st.lists(st.sampled_from(MaskReason), max_size=30))], dtype=np.uint8)
    n = len(mask)
    sampled = int((mask == MaskReason.SAMPLED).sum())
    tokens = draw(arrays_of.arrays(np.int32, n, elements=st.integers(0, 2**31 - 1)))
    logprobs = draw(arrays_of.arrays(np.float32, n, elements=st.floats(-50, 0, width=32)))
    cut = draw(st.integers(0, sampled))
    counts = [(3, D1, cut), (4, D2, sampled - cut)]
    versions = tuple(VersionRun(version, digest, count) for version, digest, count in counts if count)
    extras = {}
    for name in draw(st.sets(st.sampled_from(["routes", "top_k", "rewards"]))):
        dtype = draw(st.sampled_from(sorted(EXTRA_DTYPES)))
        shape = (n, *draw(st.lists(st.integers(1, 3), max_size=2)))
        extras[name] = draw(arrays_of.arrays(np.dtype(dtype), shape))
    return Segment(tokens, logprobs, mask, versions, draw(st.sampled_from(["stop", "length", "abort"])), extras)


def segment(n_prompt: int = 2, n_sampled: int = 3, **changes: Any) -> Segment:
    mask = np.repeat(np.array([MaskReason.PROMPT, MaskReason.SAMPLED], np.uint8), [n_prompt, n_sampled])
    n = len(mask)
    values: dict[str, Any] = {
        "tokens": np.arange(n, dtype=np.int32),
        "logprobs": np.where(mask == 0, np.float32(-0.5), np.float32(0)),
        "mask": mask,
        "versions": (VersionRun(3, D1, n_sampled),) if n_sampled else (),
        "finish": "stop",
    }
    return Segment(**(values | changes))


def trajectory(*parts: Segment, **changes: Any) -> Trajectory:
    headers, arrays = pack_segments(parts)
    values = {"lease": 5, "sample": 1, "status": "ok", "reward": 1.0, "segments": headers, "arrays": arrays}
    return Trajectory(**(values | changes))


def over_the_wire(sent: Trajectory) -> Trajectory:
    return decode_trajectory(encode_trajectory(sent))


# --- packing ---------------------------------------------------------------------------------------------------------


@given(st.lists(segments(), min_size=1, max_size=3))
@settings(suppress_health_check=[HealthCheck.too_slow])  # on a machine under load
def test_whatever_was_packed_arrives_bit_for_bit(parts: list[Segment]) -> None:
    arrived = over_the_wire(trajectory(*parts))
    check_trajectory(arrived)
    assert arrived.n_tokens == sum(len(part.tokens) for part in parts)
    assert arrived.versions == tuple(run for part in parts for run in part.versions)
    for part, header, arrays in zip(parts, arrived.segments, segment_arrays(arrived), strict=True):
        assert header.finish == part.finish
        for name in ("tokens", "logprobs", "mask"):
            assert getattr(arrays, name).dtype == getattr(part, name).dtype
            assert getattr(arrays, name).tobytes() == getattr(part, name).tobytes()
        assert list(arrays.extras) == list(part.extras)
        for name, array in part.extras.items():
            assert (arrays.extras[name].dtype, arrays.extras[name].shape) == (array.dtype, array.shape)
            assert arrays.extras[name].tobytes() == array.tobytes()


def test_the_other_fields_arrive_too() -> None:
    sent = trajectory(
        segment(), components={"format": 0.5}, position_rewards=(PositionReward(0, 4, 0.25),), node="node-2",
        engine="torch", timings=Timings(0.1, 0.2, 0.3), note="why", policy_name="other",
    )  # fmt: skip
    arrived = over_the_wire(sent)
    for name in set(Trajectory.__struct_fields__) - {"arrays"}:
        assert getattr(arrived, name) == getattr(sent, name)
    assert bytes(arrived.arrays) == bytes(sent.arrays)
    assert arrived.attempt == "5/1"


@pytest.mark.parametrize("tokens", [1, 12, 13, 3639, 3640])
def test_a_trajectory_packed_in_pieces_is_the_encoded_one(tokens: int) -> None:
    segments = [segment(1, tokens), segment(2, tokens)]
    _, pieces = lay_out(segments)
    whole = trajectory(*segments, components={"format": 0.5}, node="node-2", note="why")
    apart = msgspec.structs.replace(whole, arrays=memoryview(b""))
    for packed in (Packed(whole), Packed(apart, pieces)):
        assert packed.joined() == encode_trajectory(whole)
        assert len(packed) == len(packed.joined())


@given(st.lists(segments(), min_size=1, max_size=3))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_pieces_joined_are_what_is_encoded(parts: list[Segment]) -> None:
    headers, pieces = lay_out(parts)
    assert (headers, b"".join(pieces)) == (pack_segments(parts)[0], bytes(pack_segments(parts)[1]))
    sent = trajectory(*parts)
    assert Packed(sent, pieces).joined() == encode_trajectory(sent)


def test_a_trajectory_without_arrays_is_packed_as_it_is_encoded() -> None:
    failed = Trajectory(5, 1, "env_failed", 0.0, (), memoryview(b""), note="why")
    assert Packed(failed).joined() == encode_trajectory(failed)


def test_decoded_arrays_are_views_of_the_received_frame() -> None:
    extras = {"routes": np.arange(20, dtype=np.int16).reshape(5, 4)}
    frame = encode_trajectory(trajectory(segment(extras=extras), segment(1, 6)))
    memory = np.frombuffer(frame, dtype=np.uint8)
    for arrays in segment_arrays(decode_trajectory(frame)):
        for array in (arrays.tokens, arrays.logprobs, arrays.mask, *arrays.extras.values()):
            assert np.shares_memory(array, memory)
            assert not array.flags.writeable


def test_a_token_costs_the_wire_nine_bytes() -> None:
    headers, arrays = pack_segments([segment(10, 90)])
    assert arrays.nbytes == headers[0].nbytes == 100 * BYTES_PER_TOKEN == 900


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x93\x01\x02\x03", b"not a trajectory", b"\xff" * 100])
def test_what_is_no_trajectory_is_not_decoded(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_trajectory(data)


# --- hostile headers -------------------------------------------------------------------------------------------------

N = 5  # tokens of `segment()`
RUNS = (VersionRun(3, D1, 3),)


def header(n_tokens: int = N, *extras: Extra, versions: tuple[VersionRun, ...] = RUNS) -> SegmentHeader:
    return SegmentHeader(n_tokens, "stop", versions, extras)


# More than is there, or less: 45 bytes came.
LYING_SIZES = {
    "huge n_tokens": [header(2**62)],
    "one token too many": [header(N + 1)],
    "one token too few": [header(N - 1)],
    "two segments that claim the same bytes": [header(), header()],
    "no segments": [],
    "an extra beyond the end": [header(N, Extra("x", "<f4", (N,)))],
    "an extra that claims the next array's bytes": [header(N - 1, Extra("x", "|u1", (N - 1, 2)))],
    "an extra of a huge shape": [header(N, Extra("x", "<f8", (N, 2**40, 2**40)))],
}
# What could not be viewed, although as many bytes came as the header says.
LYING_SHAPES = {
    "no tokens": ([header(0)], 0),
    "a negative segment that makes the sum come out right": ([header(2 * N), header(-N)], 45),
    "an extra of a huge shape times nothing": ([header(N, Extra("x", "<f8", (N, 2**62, 0)))], 45),
    "two negative dimensions": ([header(N, Extra("x", "|u1", (N, -1, -1)))], 50),
    "a negative dimension": ([header(N, Extra("x", "|u1", (N, -1)))], 40),
    "more dimensions than an array can have": ([header(N, Extra("x", "|u1", (N, *[1] * 100)))], 50),
    "no dimension": ([header(N, Extra("x", "|u1", ()))], 46),
    "another number of tokens": ([header(N, Extra("x", "|u1", (N + 1,)))], 51),
    "object dtype": ([header(N, Extra("x", "|O", (N,)))], 85),
    "void dtype": ([header(N, Extra("x", "|V8", (N,)))], 85),
    "a big-endian dtype": ([header(N, Extra("x", ">f4", (N,)))], 65),
    "a structured dtype": ([header(N, Extra("x", "f4,O", (N,)))], 105),
    "no dtype at all": ([header(N, Extra("x", "", (N,)))], 45),
    "a run of no tokens": ([header(versions=(VersionRun(3, D1, 3), VersionRun(4, D2, 0)))], 45),
    "a negative run": ([header(versions=(VersionRun(3, D1, 4), VersionRun(4, D2, -1)))], 45),
    "a negative version": ([header(versions=(VersionRun(-1, D1, 3),))], 45),
}


def refuse(headers: list[SegmentHeader], nbytes: int) -> None:
    arrived = over_the_wire(trajectory(segment(), segments=tuple(headers), arrays=memoryview(bytes(nbytes))))
    tracemalloc.start()
    try:
        with pytest.raises(TrajectoryError, match="attempt 5/1"):
            check_header(arrived)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("what", LYING_SIZES)
def test_a_header_that_declares_other_bytes_than_came_is_refused_before_anything_is_allocated(what: str) -> None:
    refuse(LYING_SIZES[what], 45)


@pytest.mark.parametrize("what", LYING_SHAPES)
def test_a_header_of_impossible_arrays_is_refused_although_the_bytes_are_there(what: str) -> None:
    refuse(*LYING_SHAPES[what])


header_numbers = st.integers(-3, 9) | st.sampled_from([-(2**63), 2**31, 2**62, 2**63 - 1])
hostile_extras = st.builds(
    Extra,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["|u1", "<f4", "<f8", "|O"]),
    st.lists(header_numbers, max_size=4).map(tuple),
)
hostile_headers = st.builds(
    SegmentHeader,
    header_numbers,
    st.just("stop"),
    st.lists(st.builds(VersionRun, header_numbers, st.just(D1), header_numbers), max_size=2).map(tuple),
    st.lists(hostile_extras, max_size=2).map(tuple),
)


@given(st.lists(hostile_headers, max_size=2).map(tuple), st.integers(0, 200))
def test_a_header_is_refused_or_its_arrays_can_be_viewed(headers: tuple[SegmentHeader, ...], nbytes: int) -> None:
    hostile = trajectory(segment(), segments=headers, arrays=memoryview(bytes(nbytes)))
    try:
        check_header(hostile)
    except TrajectoryError:
        return
    assert sum(arrays.tokens.nbytes for arrays in segment_arrays(hostile)) <= nbytes


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(TrajectoryError, match="attempt 5/1: reward is"):
        check_header(trajectory(segment(), reward=reward))


# --- what needs the arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.5])
def test_a_sampled_token_without_a_proper_log_probability_is_refused(logprob: float) -> None:
    logprobs = segment().logprobs.copy()
    logprobs[3] = logprob
    with pytest.raises(TrajectoryError, match="attempt 5/1, segment 1: a behaviour log-probability"):
        check_trajectory(trajectory(segment(), segment(logprobs=logprobs)))


def test_what_was_not_sampled_needs_no_log_probability_and_rounding_may_exceed_zero() -> None:
    logprobs = segment().logprobs.copy()
    logprobs[:2] = math.nan
    logprobs[2] = 1e-6
    check_trajectory(trajectory(segment(logprobs=logprobs)))


@pytest.mark.parametrize("count", [2, 4])
def test_version_stamps_must_cover_the_sampled_tokens_of_each_segment(count: int) -> None:
    wrong = segment(versions=(VersionRun(3, D1, count),))
    with pytest.raises(TrajectoryError, match=f"segment 0: 3 sampled tokens, {count} version stamps"):
        check_trajectory(trajectory(wrong, segment(n_sampled=3 + 3 - count)))


def test_a_sampled_token_with_nothing_before_it_is_refused() -> None:
    with pytest.raises(TrajectoryError, match=r"attempt 5/1, segment 0: its first token is marked as sampled"):
        check_trajectory(trajectory(segment(n_prompt=0)))


@pytest.mark.parametrize(("token", "vocabulary_size"), [(-1, None), (-1, 5), (5, 5), (2**31 - 1, 5)])
def test_a_token_outside_the_vocabulary_is_refused(token: int, vocabulary_size: int | None) -> None:
    tokens = np.array([0, 1, 2, 4, token], np.int32)
    with pytest.raises(TrajectoryError, match="attempt 5/1, segment 1: token ids from"):
        check_trajectory(trajectory(segment(), segment(tokens=tokens)), vocabulary_size)
    check_trajectory(trajectory(segment()), vocabulary_size)


@pytest.mark.parametrize("status", ["env_failed", "aborted"])
def test_a_failed_attempt_carries_nothing(status: Any) -> None:
    check_trajectory(trajectory(status=status, reward=0.0))

"""Bundles: what is put together comes apart as it was, and what does not fit is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.bundle import (
    ALONE_BYTES,
    Bundle,
    attempts_in,
    bundled,
    decode_bundle,
    is_bundle,
    is_sound,
    largest_alone,
    opened,
    taken_apart,
    trajectories_of,
    unbundled,
)
from async_rl.trajectory import (
    Extra,
    Packed,
    PositionReward,
    Segment,
    Timings,
    Trajectory,
    TrajectoryError,
    check_arrays,
    check_header,
    check_trajectory,
    encode_trajectory,
    lay_out,
    segment_arrays,
)
from async_rl.version import VersionRun

D1, D2 = "1" * 64, "2" * 64
EMPTY = memoryview(b"")


def packed(lease: int, sample: int, sampled: int = 3, prompt: int = 2, run: Any = None, **changes: Any) -> Packed:
    tokens = np.arange(sample, sample + prompt + sampled, dtype=np.int32)
    mask = np.array([1] * prompt + [0] * sampled, np.uint8)
    logprobs = np.where(mask == 0, -0.25, 0.0).astype(np.float32)
    headers, pieces = lay_out([Segment(tokens, logprobs, mask, run or (VersionRun(4, D1, sampled),), "stop")])
    values: dict[str, Any] = {"status": "ok", "segments": headers, "node": "n", "engine": "e", **changes}
    return Packed(Trajectory(lease, sample, reward=float(sample), arrays=EMPTY, **values), pieces)


def whole(each: Packed) -> bytes:
    """The attempt as it is encoded alone."""
    return encode_trajectory(msgspec.structs.replace(each.trajectory, arrays=memoryview(b"".join(each.pieces))))


attempts = st.builds(
    packed,
    lease=st.integers(0, 2),
    sample=st.integers(0, 40),
    sampled=st.integers(1, 9),
    prompt=st.integers(1, 4),
    components=st.dictionaries(st.sampled_from(["format", "answer"]), st.floats(0, 1)),
    timings=st.builds(Timings, st.floats(0, 9)),
)


@settings(deadline=None)
@given(st.lists(attempts, min_size=1, max_size=12, unique_by=lambda each: (each.lease, each.trajectory.sample)))
def test_every_attempt_comes_out_as_it_went_in(sent: list[Packed]) -> None:
    payloads = [each.joined() for each in bundled(sent)]
    assert [len(payload) for payload in payloads] == [len(each) for each in bundled(sent)]
    found = [trajectory for payload in payloads for trajectory in trajectories_of(payload)]
    for trajectory in found:
        check_trajectory(trajectory, 100)
    assert sorted(map(encode_trajectory, found)) == sorted(map(whole, sent))
    assert len(payloads) == len({each.lease for each in sent})
    for payload in payloads:
        fields = len(payload) - sum(of.arrays.nbytes for of in trajectories_of(payload))
        alone = [len(encode_trajectory(of)) - of.arrays.nbytes for of in trajectories_of(payload)]
        assert max(alone) <= fields + ALONE_BYTES
        own = trajectories_of(payload)
        assert [of.sample for of in own] == sorted(of.sample for of in own)
        assert attempts_in(payload) == len(own)
        assert is_bundle(payload) == (len(own) > 1)
        check_opened(payload)
        if is_bundle(payload):
            assert is_sound(decode_bundle(payload))
            assert taken_apart(payload) == list(map(encode_trajectory, own))


def check_opened(payload: bytes) -> None:
    """A trainer reads what each attempt would be alone."""
    for attempt, of in zip(opened(payload), trajectories_of(payload), strict=True):
        assert msgspec.structs.replace(attempt.trajectory, arrays=of.arrays) == of
        check_arrays(attempt.trajectory, attempt.segments, 100)
        for found, own in zip(attempt.segments, segment_arrays(of), strict=True):
            for name in ("tokens", "logprobs", "mask"):
                mine, theirs = getattr(found, name), getattr(own, name)
                assert (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())


def test_arrays_that_were_joined_before_are_cut_into_the_same_columns() -> None:
    apart = [packed(7, 1), packed(7, 3, sampled=5)]
    joined = [
        Packed(msgspec.structs.replace(each.trajectory, arrays=memoryview(b"".join(each.pieces)))) for each in apart
    ]
    assert [each.joined() for each in bundled(joined)] == [each.joined() for each in bundled(apart)]


def test_of_a_bundle_that_contradicts_itself_a_trainer_reads_the_attempts_that_do_not() -> None:
    broken = msgspec.msgpack.encode(msgspec.structs.replace(sound(), sampled=(6, 3)))
    first, second = opened(broken)
    assert "6 version stamps" in first.problem
    assert (first.segments, second.problem) == ((), "")
    assert second.segments[0].tokens.tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "env_failed"},
        {"note": "cut"},
        {"position_rewards": (PositionReward(0, 3, 1.0),)},
        {"policy_name": "other"},
        {"run": (VersionRun(5, D1, 3),)},
        {"run": (VersionRun(4, D2, 3),)},
        {"run": (VersionRun(4, D1, 1), VersionRun(5, D1, 2))},
    ],
)
def test_what_is_not_alike_travels_alone(changes: dict[str, Any]) -> None:
    alike, other = [packed(7, 0), packed(7, 2)], packed(7, 1, **changes)
    found = bundled([alike[0], other, alike[1]])
    assert sorted(attempts_in(each.joined()) for each in found) == [1, 2]
    assert whole(other) in [each.joined() for each in found]


def test_one_with_an_array_more_and_one_of_two_segments_travel_alone() -> None:
    plain = packed(7, 0)
    (header,) = plain.trajectory.segments
    more = msgspec.structs.replace(header, extras=(Extra("routes", "|u1", (5,)),))
    for segments in ((more,), (header, header)):
        odd = Packed(msgspec.structs.replace(plain.trajectory, sample=1, segments=segments), plain.pieces)
        assert [attempts_in(each.joined()) for each in bundled([plain, odd])] == [1, 1]


def sound() -> Bundle:
    return decode_bundle(bundled([packed(7, 1), packed(7, 3)])[0].joined())


def test_what_an_attempt_takes_alone_counts_how_numbers_grow_that_were_written_sparingly() -> None:
    components = {str(index): 1 for index in range(60)}
    forged = msgspec.structs.replace(sound(), rewards=(1, 0), components=(components, {}), timings=([], []))
    data = msgspec.msgpack.encode(forged)
    assert max(map(len, taken_apart(data))) > len(data)
    assert max(map(len, taken_apart(data))) <= largest_alone(decode_bundle(data), len(data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": (1.0,)}, "columns of other lengths"),
        ({"finishes": ("stop",) * 3}, "columns of other lengths"),
        ({"timings": (Timings(),)}, "columns of other lengths"),
        ({"components": ({},)}, "columns of other lengths"),
        ({"rewards": (1.0, float("inf"))}, "reward is inf"),
        ({"sampled": (6, 3)}, "6 version stamps"),
        ({"n_tokens": (5, 6)}, "90 bytes of arrays declares 99"),
        ({"n_tokens": (1 << 30, 5)}, "90 bytes of arrays declares"),
        ({"arrays": memoryview(bytes(99))}, "99 bytes of arrays declares 90"),
        ({"samples": (3, 1)}, ""),
        ({"samples": (3, 3)}, ""),
    ],
)
def test_one_that_contradicts_itself_is_not_sound_and_its_attempts_say_why(changes: dict[str, Any], words: str) -> None:
    broken = msgspec.structs.replace(sound(), **changes)
    assert not is_sound(broken)
    if words:
        with pytest.raises(TrajectoryError, match=words):
            check_all(list(unbundled(broken)))


def check_all(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        check_header(trajectory)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": ()},
        {"samples": (-1, 3)},
        {"version": -1},
        {"n_tokens": (0, 5)},
        {"sampled": (0, 3)},
        {"finishes": ("stop", "never")},
        {"rewards": ("1", "2")},
        {"lease": "7"},
    ],
)
def test_what_is_no_bundle_is_not_decoded(changes: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode(msgspec.structs.replace(sound(), **changes))
    assert is_bundle(data)
    with pytest.raises(msgspec.ValidationError):
        trajectories_of(data)

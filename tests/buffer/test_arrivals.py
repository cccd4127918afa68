"""What a node says it sampled, read with suspicion."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_house import V0, answer
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trajectory import Segment, Trajectory, encode_trajectory, pack_segments
from async_rl.version import VersionRun
from async_rl.wire.messages import Lease, SamplingParams
from buffer.arrivals import read_attempt
from buffer.events import ResultArrived

LEASE = Lease(7, 0, 0, 0, "train", (0, 1), (1, 2), 0, SamplingParams(1.0, 8))
GOOD = encode_trajectory(answer(LEASE, 1, V0))


def read(data: bytes, largest: int) -> ResultArrived | None:
    return read_attempt("n", memoryview(data), largest)


def spoilt(**changes: Any) -> bytes:
    return encode_trajectory(msgspec.structs.replace(answer(LEASE, 1, V0), **changes))


def test_a_good_one_is_read_as_it_was_written() -> None:
    found = read(GOOD, 10_000)
    assert found is not None
    assert (found.lease, found.sample, found.status, found.reward, found.n_tokens, found.problem) == (
        7,
        1,
        "ok",
        1.0,
        5,
        "",
    )
    assert found.versions == (VersionRun(0, V0.digest, 3),)
    assert found.payload == GOOD


def test_why_an_attempt_failed_is_read_with_it_up_to_what_nodes_write() -> None:
    found = read(spoilt(status="env_failed", segments=(), arrays=memoryview(b""), note="no judge" + "!" * 900), 10_000)
    assert found is not None
    assert (found.status, found.problem) == ("env_failed", "")
    assert found.note == "no judge" + "!" * 192


def test_of_one_that_is_too_large_only_the_name_is_read() -> None:
    """Decoded, this one would be some hundred times its size."""
    components = {f"{index:x}": 0.0 for index in range(200_000)}
    large = spoilt(components=components)
    del components
    tracemalloc.start()
    found = read(large, 10_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    assert (found.lease, found.sample, found.payload) == (7, 1, b"")
    assert "more than the 10000" in found.problem
    assert peak < 100_000


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ({"n_tokens": 1 << 40}, "declared"),
        ({"n_tokens": 0}, "0 tokens"),
        ({"versions": (VersionRun(0, "a", 1 << 62),)}, "version stamps"),
        ({"versions": (VersionRun(1 << 40, "a", 1),)}, "version that is none"),
        ({"versions": (VersionRun(0, "a", -1),)}, "count below 1"),
    ],
)
def test_what_contradicts_itself_has_a_problem_and_keeps_its_name(segment: dict[str, Any], words: str) -> None:
    (header,) = answer(LEASE, 1, V0).segments
    found = read(spoilt(segments=(msgspec.structs.replace(header, **segment),)), 10_000)
    assert found is not None
    assert found.lease == 7
    assert words in found.problem


def test_extras_of_one_name_are_refused() -> None:
    mask = np.array([1, 0], np.uint8)
    segment = Segment(
        np.zeros(2, np.int32), np.zeros(2, np.float32), mask, (VersionRun(0, V0.digest, 1),), "stop",
        {"a": np.zeros(2, np.int8), "b": np.zeros(2, np.int8)},
    )  # fmt: skip
    headers, arrays = pack_segments([segment])
    twice = tuple(msgspec.structs.replace(extra, name="a") for extra in headers[0].extras)
    headers = (msgspec.structs.replace(headers[0], extras=twice),)
    found = read(encode_trajectory(Trajectory(1, 0, "ok", 0.0, headers, arrays)), 10_000)
    assert found is not None
    assert "of one name" in found.problem


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_read_or_not_and_nothing_else_happens(data: bytes, largest: int) -> None:
    found = read(data, largest)
    assert found is None or isinstance(found.lease, int)


@given(st.data())
def test_a_good_one_with_wrong_bytes_in_it_is_read_or_not(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(GOOD) - 1))
    cut = data.draw(st.integers(0, len(GOOD)))
    bent = bytearray(GOOD)
    bent[place] ^= data.draw(st.integers(1, 255))
    for each in (bytes(bent), bytes(bent[:cut])):
        found = read(each, 10_000)
        assert found is None or found.payload == (b"" if found.problem else each)

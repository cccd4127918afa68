"""Events as records: any event comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.version import VersionRun
from buffer.entries import entry_parts, read_entry
from buffer.events import DrawRequested, HandedPrefix, PrefixesHandedOver, ResultArrived, ResultsArrived, Ticked

payloads = st.binary(max_size=100).map(memoryview)
runs = st.lists(st.builds(VersionRun, st.integers(0, 9), st.just("d" * 64), st.integers(1, 9)), max_size=2).map(tuple)
numbers = st.integers(0, 1 << 40)
results = st.builds(
    ResultArrived, st.just("node"), numbers, numbers, st.sampled_from(["ok", "env_failed", "aborted"]),
    st.floats(allow_nan=False), runs, numbers, payloads, st.sampled_from(["", "broken"]),
)  # fmt: skip
prefixes = st.builds(HandedPrefix, numbers, runs, payloads)
some_events = st.one_of(
    results,
    st.lists(results, max_size=5).map(lambda found: ResultsArrived(tuple(found))),
    st.lists(prefixes, max_size=5).map(lambda found: PrefixesHandedOver("node", 3, tuple(found))),
    st.builds(DrawRequested, numbers),
    st.just(Ticked()),
)


def record(event: Any, now: float) -> bytes:
    return b"".join(entry_parts(event, now))


@settings(max_examples=100, derandomize=True)
@given(some_events, st.floats(0, 1e9))
def test_an_event_comes_back_as_it_was_with_its_payloads_as_views_of_the_record(event, now):
    entry = read_entry(memoryview(record(event, now)))
    assert (entry.now, entry.event) == (now, event)


@settings(max_examples=100, derandomize=True)
@given(some_events, st.data())
def test_a_record_that_is_cut_or_has_something_behind_it_is_refused(event, data):
    whole = record(event, 1.0)
    length = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:length], whole + b"x"):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            read_entry(memoryview(broken))


def test_a_payload_is_neither_copied_into_the_head_nor_before_it_is_written():
    payload = memoryview(bytearray(1000))
    event = ResultArrived("node", 1, 0, "ok", 1.0, (), 3, payload)
    size, head, behind = entry_parts(ResultsArrived((event,)), 1.0)
    assert (len(size), behind) == (4, payload)
    assert behind is payload
    assert len(head) < 100

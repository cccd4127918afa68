"""A stream is read forward; what was asked long ago is found by beginning again."""

from __future__ import annotations

import random
import threading

import pytest

from async_rl.data.stream import KEPT_BLOCKS, ForwardRows
from async_rl.errors import AsyncRLError


class Stream:
    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def begin(self):
        for n in range(self.count):
            self.read += 1
            yield {"n": n}


def test_rows_of_one_block_after_the_other_are_read_once():
    stream = Stream(95)
    rows = ForwardRows(stream.begin, 95, 10, "here")
    for first in range(0, 95, 10):
        numbers = list(range(first, min(first + 10, 95)))
        random.Random(first).shuffle(numbers)
        assert [rows[n]["n"] for n in numbers] == numbers
    assert (stream.read, rows.opened) == (95, 1)


def test_any_row_can_be_asked_at_any_time_and_a_few_blocks_are_kept():
    stream = Stream(100)
    rows = ForwardRows(stream.begin, 100, 10, "here")
    chance = random.Random(1)
    for _ in range(300):
        number = chance.randrange(100)
        assert rows[number] == {"n": number}
        assert len(rows._kept) <= KEPT_BLOCKS
    assert rows.opened > 1
    opened, read = rows.opened, stream.read
    for number in range(90, 100):
        rows[number]
    assert rows.opened <= opened + 1
    again = stream.read
    for number in range(90, 100):
        rows[number]
    assert stream.read == again >= read


@pytest.mark.parametrize("there", [0, 7, 10, 34, 39])
def test_a_stream_that_is_shorter_than_it_should_be_says_so(there):
    rows = ForwardRows(Stream(there).begin, 40, 10, "[[task.source]] 'x'")
    with pytest.raises(AsyncRLError, match=f"'x': the stream ends after {there} rows, and it should have 40: set"):
        rows[39]
    if there >= 10:
        assert rows[9] == {"n": 9}  # what there is can still be had


def test_what_is_there_can_be_had_while_the_next_block_is_waited_for():
    there = threading.Event()

    def begin():
        for n in range(40):
            if n == 10:
                assert there.wait(30)
            yield {"n": n}

    rows = ForwardRows(begin, 40, 10, "here")
    assert [rows[n]["n"] for n in range(10)] == list(range(10))
    assert rows._ahead is not None
    assert rows._ahead.is_alive()
    there.set()
    rows._ahead.join(30)
    assert list(rows._kept) == [0, 1]
    assert (rows[15], rows.opened) == ({"n": 15}, 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_that_broke_off_is_begun_again(ahead):
    begun = []

    def begin():
        begun.append(1)
        for n in range(40):
            if len(begun) == 1 and n == 25:
                raise OSError("the network is away")
            yield {"n": n}

    rows = ForwardRows(begin, 40, 10, "here")
    if ahead:  # then nobody has missed it yet
        assert rows[15] == {"n": 15}
        assert rows._ahead is not None
        rows._ahead.join(30)
    else:
        with pytest.raises(OSError, match="network"):
            rows[35]
    assert (rows[35], rows.opened) == ({"n": 35}, 2)


def test_a_longer_one_ends_where_it_should():
    rows = ForwardRows(Stream(1000).begin, 15, 10, "here")
    assert [rows[n]["n"] for n in range(15)] == list(range(15))

"""Between a program and its tests: what is plain arrives as it was, and nothing else arrives."""

from __future__ import annotations

import collections
import enum
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.sandbox.values import NotPlain, decode, encode

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(min_value=1 << 60, max_value=1 << 70) | st.text()
    | st.floats(allow_nan=False) | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
PLAIN = st.recursive(
    HASHABLE | st.builds(range, st.integers(-9, 9), st.integers(-9, 9)) | st.builds(bytearray, st.binary()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4)
    | st.sets(HASHABLE, max_size=4) | st.tuples(inner),
    max_leaves=12,
)  # fmt: skip


def carried(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def shape(value: Any) -> Any:
    """With the types of everything, in which 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return dict, [(shape(key), shape(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(shape(each)) for each in value)
    return type(value), repr(value)


@settings(deadline=None, max_examples=60)
@given(PLAIN)
def test_a_plain_value_arrives_as_it_was(value: Any) -> None:
    assert shape(carried(value)) == shape(value)


def test_a_number_has_as_many_digits_as_it_likes() -> None:
    for value in (1 << 40000, -(1 << 40000), (1 << 62) - 1, 1 << 62, -(1 << 62)):
        assert carried(value) == value


WORDS = st.sampled_from(["dict", "int", "range", "set", "bytes", "complex", "iterator"])
MESSAGES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(WORDS, inner) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(MESSAGES)
def test_what_is_no_value_is_refused_and_never_anything_else(message: Any) -> None:
    try:
        value = decode(message)
    except ValueError:
        return
    assert type(value).__module__ == "builtins"


class Colour(enum.IntEnum):
    RED = 1


class Yes:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class EqualInt(int):
    __eq__ = Yes.__eq__
    __hash__ = int.__hash__


def test_what_is_derived_arrives_as_what_it_is_derived_from() -> None:
    pair = collections.namedtuple("pair", "a b")
    for value, plain in (
        (collections.Counter("aab"), {"a": 2, "b": 1}), (collections.OrderedDict(a=1), {"a": 1}), (pair(1, 2), (1, 2)),
        (Colour.RED, 1), (EqualInt(5), 5), (type("S", (str,), {})("x"), "x"), (type("F", (float,), {})(0.5), 0.5),
    ):  # fmt: skip
        assert shape(carried(value)) == shape(plain)


def test_an_iterator_arrives_as_one() -> None:
    arrived = carried(x * x for x in range(3))
    assert next(arrived) == 0
    assert list(arrived) == [1, 4]


@pytest.mark.parametrize("value", [Yes(), object(), print, [Yes()], {"a": Yes()}, type, (Yes(),)])
def test_anything_else_is_not_plain(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value)


def test_depth_has_a_limit_on_either_side() -> None:
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(NotPlain):
        encode(deep)

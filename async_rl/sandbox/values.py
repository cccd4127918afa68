"""Plain values as JSON, and back: what a program under test is asked, and what it answers.

What comes back is of these types exactly, so nothing of the program's comes with it: an `__eq__` that says yes to
everything stays where it was made. Types derived from them (a Counter, a named tuple) arrive as what they are derived
from, which Python calls equal to them. An iterator arrives as one over what was left in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_DEPTH = 100
MOST_DIGITS = 1 << 62  # beyond it in hexadecimal: decimal digits take the square of their number, and have a limit


class NotPlain(TypeError):
    """A value of another type."""


def encode(value: Any, depth: int = 0) -> Any:
    """What `json.dumps` takes: a scalar as it is, anything else as [tag, content]. Raises NotPlain."""
    if depth > MOST_DEPTH:
        raise NotPlain(f"nested deeper than {MOST_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -MOST_DIGITS < whole < MOST_DIGITS else ["int", hex(whole)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes | bytearray):
        return [_base_name(value, bytes, bytearray), bytes(value).hex()]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(each, depth + 1)] for key, each in value.items()]]
    if isinstance(value, list | tuple | set | frozenset):
        name = _base_name(value, list, tuple, set, frozenset)
        return [name, [encode(each, depth + 1) for each in value]]
    if isinstance(value, Iterator):
        return ["iterator", [encode(each, depth + 1) for each in value]]
    raise NotPlain(f"a value of type {type(value).__name__}")


def decode(value: Any) -> Any:
    """The value that `encode` was given. Raises ValueError for what it did not make."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        tag, content = value
        if tag == "complex":
            return complex(*content)
        if tag == "int":
            return int(content, 16)
        if tag == "bytes":
            return bytes.fromhex(content)
        if tag == "bytearray":
            return bytearray.fromhex(content)
        if tag == "range":
            return range(*content)
        if tag == "dict":
            return {decode(key): decode(each) for key, each in content}
        if tag == "iterator":
            return iter([decode(each) for each in content])
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag](decode(each) for each in content)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"no value: {error}") from None


def _base_name(value: Any, *kinds: type[Any]) -> str:
    return next(kind.__name__ for kind in kinds if isinstance(value, kind))

"""The rules' whole state as bytes, and back: where a journal begins once its first part was deleted.

Replay is a graph of plain objects: rules, tables, groups, leases, nodes, which refer to each other. `dump` walks it
once and gives each object a number; `load` makes the same graph again. Only classes of the modules named here can come
out of a snapshot, whatever the bytes say, and nothing of them is called. Payloads are left out (they are much, and lie
in the journal): a restored attempt has an empty one, and so may be drawn only by those who will not look at it.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from async_rl import proof, version
from async_rl.errors import AsyncRLError
from async_rl.wire import messages
from buffer import (
    adaptive,
    admission,
    capacity,
    evaluation,
    events,
    groups,
    handover,
    instances,
    leases,
    ledger,
    newest,
    nodes,
    order,
    proofs,
    quarantine,
    replay,
    reuse,
    rules,
)  # fmt: skip

SNAPSHOT_SCHEMA = 8

MODULES: tuple[ModuleType, ...] = (
    version, proof, messages, adaptive, admission, capacity, evaluation, events, groups, handover, instances, leases,
    ledger, newest, nodes, order, proofs, quarantine, replay, reuse,
)  # fmt: skip
CLASSES: Mapping[str, type] = {
    f"{module.__name__}.{name}": kind
    for module in MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and kind.__module__ == module.__name__
}
SEQUENCES: Mapping[str, type] = {"l": list, "t": tuple, "s": set, "f": frozenset}
TABLES: Mapping[str, type] = {"d": dict, "o": OrderedDict, "c": Counter, "m": dict}
SEQUENCE_TAGS = {kind: tag for tag, kind in SEQUENCES.items()}
TABLE_TAGS = {kind: tag for tag, kind in TABLES.items() if tag != "m"}
BYTES_TAGS: Mapping[type, str] = {bytes: "b", bytearray: "y"}
PAYLOAD = "payload"  # the field that is left out
PLAIN = frozenset({type(None), bool, float, str})
HELD = tuple(field for field in leases.Held.__struct_fields__ if field != PAYLOAD)
held_values: Callable[[leases.Held], tuple[Any, ...]] = attrgetter(*HELD)  # numbers: the mask first, none of many bits
MANY_BITS = 1 << 63
NOTHING: Mapping[str, Any] = MappingProxyType({})

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class SnapshotError(AsyncRLError):
    """The bytes are no snapshot of this version of async-rl."""


def dump(state: replay.Replay) -> bytes:
    """Equal states give equal bytes."""
    return _Dumper().dump(state)


def load(data: bytes | memoryview, of: rules.Rules) -> replay.Replay:
    """Raises SnapshotError."""
    try:
        schema, root, kinds, objects = _decoder.decode(data)
        if schema != SNAPSHOT_SCHEMA:
            raise SnapshotError(f"the snapshot has schema {schema}, this version of async-rl reads {SNAPSHOT_SCHEMA}")
        state = _Loader(kinds, objects, of).value(root)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error) as error:
        raise SnapshotError(f"the snapshot of the buffer's state cannot be read: {error!r}") from error
    if not isinstance(state, replay.Replay):
        raise SnapshotError("the snapshot is not one of the buffer's state")
    return state


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))


class _Dumper:
    """Objects that may be referred to twice go into a table, by number; all else is written where it is found."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        self._kinds: dict[type, tuple[int, tuple[str, ...]]] = {}  # number and slots, of those that objects have

    def dump(self, state: replay.Replay) -> bytes:
        root = self.value(state)
        kinds = [(f"{kind.__module__}.{kind.__name__}", *slots) for kind, (_, slots) in self._kinds.items()]
        return _encoder.encode((SNAPSHOT_SCHEMA, root, kinds, self._objects))

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value if -MANY_BITS <= value < MANY_BITS else ("i", hex(value))
        if kind in PLAIN:
            return value
        if kind is leases.Held:
            samples, *numbers = held_values(value)
            return ("h", self.value(samples), *numbers)
        if kind in SEQUENCE_TAGS:
            items = sorted(value) if kind in (set, frozenset) else value
            return (SEQUENCE_TAGS[kind], *[self.value(item) for item in items])
        if kind is deque:
            return ("q", value.maxlen, *[self.value(item) for item in value])
        if kind in TABLE_TAGS:
            return (TABLE_TAGS[kind], *[self.value(item) for pair in value.items() for item in pair])
        if kind is MappingProxyType:
            return ("m", *[self.value(item) for pair in value.items() for item in pair])
        if kind in BYTES_TAGS:
            return (BYTES_TAGS[kind], bytes(value))
        if kind is array:
            return ("a", value.typecode, value.tobytes())
        if kind is rules.Rules:
            return ("r",)
        if isinstance(value, tuple):  # a named one
            return ("v", self._name(kind), *map(self.value, value))
        if isinstance(value, msgspec.Struct):
            fields = [b"" if field == PAYLOAD else getattr(value, field) for field in value.__struct_fields__]
            return ("v", self._name(kind), *map(self.value, fields))
        return ("@", self._object(value, kind))

    def _name(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__name__}"
        if name not in CLASSES:
            raise TypeError(f"{name} is in the state of the rules, but not in buffer.snapshot.MODULES")
        return name

    def _object(self, value: Any, kind: type) -> int:
        """Its number; a row of the table is the kind's number, the slots, then name and value of what else it has."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(None)
            if kind not in self._kinds:
                self._name(kind)
                self._kinds[kind] = (len(self._kinds), _slots(kind))
            kind_number, slots = self._kinds[kind]
            row = [kind_number, *[self.value(getattr(value, slot)) for slot in slots]]
            for name, item in getattr(value, "__dict__", NOTHING).items():
                row += (name, self.value(item))
            self._objects[number] = row
        return number


class _Loader:
    def __init__(self, kinds: list[Any], objects: list[Any], of: rules.Rules) -> None:
        self._kinds = [(CLASSES[name], slots) for name, *slots in kinds]
        self._objects = objects
        self._made: dict[int, Any] = {}
        self._rules = of

    def value(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        tag, *rest = data
        if tag in SEQUENCES:
            return SEQUENCES[tag](map(self.value, rest))
        if tag in TABLES:
            table = TABLES[tag](dict(zip(map(self.value, rest[::2]), map(self.value, rest[1::2]), strict=True)))
            return MappingProxyType(table) if tag == "m" else table
        match tag:
            case "@":
                return self._object(rest[0])
            case "q":
                return deque(map(self.value, rest[1:]), maxlen=rest[0])
            case "h":
                rest[0] = self.value(rest[0])
                return leases.Held(**dict(zip(HELD, rest, strict=True)), payload=b"")
            case "v":
                kind = CLASSES[rest[0]]
                return kind(*map(self.value, rest[1:]))
            case "i":
                return int(rest[0], 16)
            case "b" | "y":
                return rest[0] if tag == "b" else bytearray(rest[0])
            case "a":
                return array(rest[0], rest[1])
            case "r":
                return self._rules
        raise ValueError(f"{tag!r} is no tag of a snapshot")

    def _object(self, number: int) -> Any:
        """An object is known before its attributes are made, since these may refer to it."""
        made = self._made.get(number)
        if made is None:
            kind_number, *values = self._objects[number]
            kind, slots = self._kinds[kind_number]
            made = self._made[number] = object.__new__(kind)
            others = values[len(slots) :]
            for slot, item in zip(slots, values[: len(slots)], strict=True):
                setattr(made, slot, self.value(item))
            for name, item in zip(others[::2], others[1::2], strict=True):
                setattr(made, name, self.value(item))
        return made

"""An event as a record of the journal: its payloads are written behind it, from where they arrived, and not copied.

bytes of the head u32 | head: an Entry in msgpack, its payloads empty | payload | payload | ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from async_rl.trajectory import EncodedTrajectory
from buffer.events import AnyEvent, BundleArrived, PrefixesHandedOver, ResultArrived, ResultsArrived

HEAD_BYTES = struct.Struct("<I")
NOTHING = memoryview(b"")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An event, and when it was applied, in seconds on the clock that the run began with. `payloads` are the sizes of
    those that it carries, in order."""

    now: float
    event: AnyEvent
    payloads: list[int] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def entry_parts(event: AnyEvent, now: float) -> list[EncodedTrajectory]:
    """The parts of its record."""
    payloads: list[EncodedTrajectory] = []
    bare: AnyEvent = event
    if isinstance(event, ResultsArrived):
        payloads = [result.payload for result in event.results]
        bare = ResultsArrived(tuple([replace(result, payload=NOTHING) for result in event.results]))
    elif isinstance(event, ResultArrived | BundleArrived):
        payloads = [event.payload]
        bare = replace(event, payload=NOTHING)
    elif isinstance(event, PrefixesHandedOver):
        payloads = [prefix.payload for prefix in event.prefixes]
        bare = replace(event, prefixes=tuple([replace(prefix, payload=NOTHING) for prefix in event.prefixes]))
    head = _encoder.encode(Entry(now, bare, [len(payload) for payload in payloads]))
    return [HEAD_BYTES.pack(len(head)), head, *payloads]


def read_entry(record: memoryview) -> Entry:
    """The entry again, its payloads as views of the record. Raises msgspec.MsgspecError for what is none, and
    ValueError when sizes do not agree."""
    if len(record) < HEAD_BYTES.size:
        raise ValueError(f"a record of {len(record)} bytes")
    start = HEAD_BYTES.size + HEAD_BYTES.unpack_from(record)[0]
    entry = _decoder.decode(record[HEAD_BYTES.size : start])
    if start + sum(entry.payloads) != len(record):
        raise ValueError(f"payloads of {sum(entry.payloads)} bytes in a record with {len(record) - start}")
    return replace(entry, event=_filled(entry.event, _payloads(record, start, entry.payloads)))


def _payloads(record: memoryview, start: int, sizes: list[int]) -> Iterator[memoryview]:
    for size in sizes:
        yield record[start : start + size]
        start += size


def _filled(event: AnyEvent, payloads: Iterator[memoryview]) -> AnyEvent:
    """With a payload for each place; raises ValueError when they are not as many."""
    if isinstance(event, ResultsArrived):
        pairs = zip(event.results, payloads, strict=True)
        return ResultsArrived(tuple([replace(result, payload=payload) for result, payload in pairs]))
    if isinstance(event, ResultArrived | BundleArrived):
        (payload,) = payloads
        return replace(event, payload=payload)
    if isinstance(event, PrefixesHandedOver):
        handed = zip(event.prefixes, payloads, strict=True)
        return replace(event, prefixes=tuple([replace(prefix, payload=payload) for prefix, payload in handed]))
    return event

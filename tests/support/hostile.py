"""Messages that nobody honest sends: random, cut, bent, forged, replayed, pickled, and of declared sizes that are lies.

Nothing here knows a run's token, but what `insiders` makes for a peer that has one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_rl.bundle import Bundle
from async_rl.trajectory import Extra, SegmentHeader, Trajectory, encode_trajectory
from async_rl.version import PolicyId, VersionRun
from async_rl.wire import frames
from async_rl.wire.messages import (
    MAGIC,
    SCHEMA,
    Confirm,
    Disposition,
    Draw,
    EvalRequest,
    Finish,
    GiveBack,
    HandOver,
    LeaseSamples,
    NodeReady,
    NodeServing,
    NodeTrouble,
    NodeWants,
    PinPolicy,
    PolicyPublished,
    Progress,
    Pull,
    Results,
    Route,
    SamplingParams,
    StatusRequest,
    TrainerReady,
    Upload,
)
from async_rl.wire.session import Report

NOTHING = Report(0, 0)
NEVER = PolicyId("main", 10**9, "f" * 64)  # a policy that nobody published
LARGE = (1 << 63) - 1


def pickles(trace: Path) -> list[bytes]:
    """Each would make the file `trace`, were it ever loaded."""
    command = f"touch {trace}"
    return [
        f"cos\nsystem\n(S'{command}'\ntR.".encode(),
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(command)]) + command.encode() + b"\x85R.",
        b"\x80\x02cbuiltins\nexec\nX" + len(f"open('{trace}','w')").to_bytes(4, "little")
        + f"open('{trace}','w')".encode() + b"\x85R.",
    ]  # fmt: skip


def strangers(run: str, names: list[str], trace: Path, rng: random.Random) -> Iterator[list[bytes]]:
    """Without end: multi-part messages of a peer that knows the run's id and its peers' names, and no token."""
    data = frames.payload_of(Draw(666), [])
    while True:
        name, epoch = rng.choice(names), rng.choice([0, 1, rng.getrandbits(62), (1 << 64) - 1])
        hello = frames.Hello("node", name, rng.choice(["", "guess", "0" * 64, "é" * 32]), 0, 0, 1.0)
        forged = frames.head_frame(run, name, epoch, rng.choice([1, 2, 10**6]), NOTHING, data)
        good = [
            forged,
            frames.head_frame("0123456789abcdef", name, epoch, 1, NOTHING, data),  # of an earlier run of this name
            frames.link_frame(run, name, epoch, NOTHING, hello),
            frames.link_frame("0123456789abcdef", name, epoch, NOTHING, hello),
            frames.link_frame(run, name, epoch, NOTHING, frames.Bye("in another's name")),
            frames.link_frame(run, name, epoch, Report(LARGE, LARGE), frames.Ping()),
            frames.link_frame(run, name, epoch, NOTHING, frames.Welcome(epoch, 0, 1.0)),
        ]
        any_one = bytearray(rng.choice(good))
        bent = bytes(any_one)
        for _ in range(rng.randint(1, 4)):
            any_one[rng.randrange(len(any_one))] ^= 1 << rng.randrange(8)
        yield [
            [rng.choice(good)],
            [bytes(any_one)],
            [bent[: rng.randrange(len(bent))]],
            [rng.randbytes(rng.randrange(300))],
            [rng.choice(pickles(trace))],
            [forged, rng.choice(pickles(trace))],
            [b"\xdd" + rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"]) + rng.randbytes(rng.randrange(20))],
            [b"\x91" * rng.choice([50, 3000, 20_000])],  # arrays within arrays
            [b"\x9c" + forged[1:] + b"\xdd" + (60_000).to_bytes(4, "big") + b"\xc0" * 60_000],  # many nothings
            [msgspec.msgpack.encode([MAGIC, SCHEMA + 1, run, name, epoch, 0, 0, 0, "hello", ["hello"]])],
            [b"", b""],
        ][rng.randrange(11)]


def insiders(trace: Path, rng: random.Random) -> Iterator[Any]:
    """Without end: messages, or bytes in place of one, of a node that has the run's token and means harm."""
    size = rng.choice([0, -1, LARGE, 1 << 40])
    while True:
        size = rng.choice([0, -1, LARGE, 1 << 40, (1 << 31) - 1])
        lease, sample = rng.choice([0, 1, rng.randrange(1000), LARGE, -1]), rng.choice([0, 1, 63, 10**6, LARGE, -1])
        header = SegmentHeader(
            rng.choice([size, 4]), "stop", (VersionRun(rng.choice([0, size]), "f" * 64, rng.choice([1, size])),),
            rng.choice([(), (Extra("x", rng.choice(["|O", "<f8", "V8"]), (4, size)),)]),
        )  # fmt: skip
        attempt = encode_trajectory(
            Trajectory(lease, sample, "ok", rng.choice([1.0, float("nan")]), (header,), memoryview(bytes(36)))
        )
        count = rng.choice([1, 2, 64])
        several = Bundle(
            lease, (sample, *range(count - 1)), rng.choice([0, size]), "f" * 64,
            (rng.choice([1.0, float("nan")]),) * count, (rng.choice([size, 4]),) * count,
            (rng.choice([1, size]),) * rng.choice([count, 3]), ("stop",) * count,
            rng.choice([(), ({"x" * 5000: 1.0},) * count]), (), "n", "e", "main", memoryview(bytes(36 * count)),
        )  # fmt: skip
        attempt = rng.choice([attempt, msgspec.msgpack.encode(several)])
        attempt = rng.choice([attempt, attempt[: rng.randrange(1, len(attempt))] or b"\xc0", b"\xc4\x02\x00\x00"])
        nothing_yet = Progress(size, {0: size}, 1, 1, {"issued": size}, {})
        yield rng.choice(
            [
                rng.randbytes(rng.randrange(1, 100)),
                rng.choice(pickles(trace)),
                b"\xdd\xff\xff\xff\xff",
                NodeReady("x" * rng.choice([1, 100_000]), size, {"test": "x" * rng.choice([1, 10_000])}),
                NodeServing(NEVER, size, float("nan")),
                NodeServing(NEVER, 0, 0.0),
                NodeTrouble(NEVER, "\x1b[2J\n" * rng.choice([1, 2000]), True),
                NodeWants(size, float("inf"), -1.0, size, size),
                Results((msgspec.Raw(attempt),) * rng.choice([1, 3])),
                Results((msgspec.Raw(b"\xc0"),)),  # says that a frame follows
                HandOver((msgspec.Raw(attempt),)),
                GiveBack((LeaseSamples(lease, (sample, -sample, sample)),)),
                Finish("forged"),
                PolicyPublished(NEVER),
                PinPolicy(NEVER, True),
                TrainerReady({}, {}, nothing_yet),
                Confirm(0, (Disposition(lease, (sample,), "trained"),)),
                Confirm(0, (Disposition(lease, (), "trained"),)),
                EvalRequest(NEVER, size, SamplingParams(-1.0, size), float("nan")),
                EvalRequest(NEVER, 1, SamplingParams(1.0, 1), 1.0),
                Upload(NEVER, "lora", size, "0" * 64),
                Upload(NEVER, "factors", size, "0" * 64, NEVER),
                Upload(NEVER, "snapshot", 1 << 40, "", None, size),
                Route(NEVER, rng.choice([None, NEVER])),
                Pull(NEVER, size, size),
                Pull(NEVER, 0, 1),
                StatusRequest(),
            ]
        )


def as_payload(said: Any) -> frames.Payload:
    """Bytes stand where a message's body should."""
    if isinstance(said, bytes):
        return frames.Payload("Draw", (said,), (), frames.credit_size(len(said), ()))
    return frames.payload_of(said, ())

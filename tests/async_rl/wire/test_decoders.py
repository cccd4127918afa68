"""Decoders, fed with anything: random bytes, and good messages with wrong bytes in them."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from decoders import decode_all
from hostile import as_payload, insiders, strangers
from hypothesis import given
from hypothesis import strategies as st

from async_rl.wire.frames import BadFrame, head_frame, read_messages
from async_rl.wire.messages import EvalRequest, NodeReady, NodeWants, Pull, SamplingParams, encode_body
from async_rl.wire.session import Report

ANY = random.Random(0)
FRAMES = [parts[0] for parts, _ in zip(strangers("r", ["n"], Path("/nowhere"), ANY), range(400), strict=False)]
SAID = [as_payload(said) for said, _ in zip(insiders(Path("/nowhere"), ANY), range(400), strict=False)]
BODIES = [b"".join(bytes(part) for part in payload.parts) for payload in SAID]
WHOLE = [head_frame("r", "n", 1, 1, Report(0, 0), payload) for payload in SAID]


@given(st.binary(max_size=2000))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    decode_all(data)


@pytest.mark.parametrize("known", [FRAMES, BODIES, WHOLE], ids=["frames", "bodies", "whole"])
@given(data=st.data())
def test_hostile_messages_bent_and_cut_are_read_or_refused(known: list[bytes], data: st.DataObject) -> None:
    bent = bytearray(known[data.draw(st.integers(0, len(known) - 1))])
    decode_all(bytes(bent))
    for place in data.draw(st.lists(st.integers(0, max(0, len(bent) - 1)), max_size=4)):
        if bent:
            bent[place] ^= data.draw(st.integers(1, 255))
    decode_all(bytes(bent))
    decode_all(bytes(bent[: data.draw(st.integers(0, len(bent)))]))


@pytest.mark.parametrize(
    "message",
    [
        NodeReady("torch", 0, {}),
        NodeReady("torch", 1 << 40, {}),
        NodeReady("x" * 1000, 1, {}),
        NodeReady("torch", 1, {str(part): "" for part in range(1000)}),
        NodeWants(-1),
        NodeWants(0, float("nan")),
        NodeWants(0, 1.0, float("inf")),
        EvalRequest(("main", 0, "0" * 64), 1 << 40, SamplingParams(1.0, 1), 1.0),  # type: ignore[arg-type]
        EvalRequest(("main", 0, "0" * 64), 1, SamplingParams(float("nan"), 1), 1.0),  # type: ignore[arg-type]
        EvalRequest(("main", 0, "../" * 20), 1, SamplingParams(1.0, 1), 1.0),  # type: ignore[arg-type]
        Pull(("main", 0, "0" * 64), 0, 1 << 40),  # type: ignore[arg-type]
        Pull(("main", -1, "0" * 64), 0, 1),  # type: ignore[arg-type]
    ],
)
def test_sizes_and_numbers_beyond_reason_are_refused(message: object) -> None:
    with pytest.raises(BadFrame):
        read_messages((msgspec.Raw(encode_body(message)),))  # type: ignore[arg-type]

"""Routes on the wire: any that a model can have survive it, and what is broken is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import batch_bytes, check_config, config_from_table
from async_rl.routes import RouteShape, check_routes, read_route_shape, route_extras, route_shape, routes_of
from async_rl.schema import ConfigError
from async_rl.trajectory import (
    MaskReason,
    Segment,
    SegmentArrays,
    Trajectory,
    TrajectoryError,
    check_trajectory,
    decode_trajectory,
    encode_trajectory,
    pack_segments,
    segment_arrays,
)
from async_rl.version import VersionRun

SHAPE = RouteShape(layers=4, routed=(1, 2, 3), experts=300, each=8)
QWEN3_30B = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": []}


def routes(shape: RouteShape, positions: int, seed: int = 0) -> np.ndarray:
    out = np.full((positions, shape.layers, shape.each), -1, np.int32)
    random = np.random.default_rng(seed).random((positions, len(shape.routed), shape.experts))
    out[:, list(shape.routed)] = random.argsort(-1)[..., : shape.each]
    return out


def sent(extras: dict[str, Any], n: int) -> SegmentArrays:
    """What arrives of a segment of n tokens, the first of them a prompt."""
    mask = np.full(n, MaskReason.SAMPLED, np.uint8)
    mask[0] = MaskReason.PROMPT
    segment = Segment(
        np.arange(n, dtype=np.int32), np.full(n, -1, np.float32), mask, (VersionRun(3, "d", n - 1),), "stop", extras
    )
    headers, arrays = pack_segments([segment])
    received = decode_trajectory(encode_trajectory(Trajectory(5, 2, "ok", 1.0, headers, arrays)))
    check_trajectory(received)
    (found,) = segment_arrays(received)
    return found


@given(
    layers=st.integers(1, 6), dense=st.integers(0, 5), experts=st.integers(1, 32767), each=st.integers(1, 8),
    positions=st.integers(1, 20), missing=st.integers(0, 20), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_routes_arrive_as_they_were(
    layers: int, dense: int, experts: int, each: int, positions: int, missing: int, seed: int
) -> None:
    shape = RouteShape(layers, tuple(range(min(dense, layers - 1), layers)), max(experts, each), each)
    random = np.random.default_rng(seed)
    known = np.full((positions, layers, each), -1)
    for layer in shape.routed:
        for position in range(positions):
            start = random.integers(0, shape.experts - each + 1)
            known[position, layer] = random.permutation(np.arange(start, start + each))
    found = sent(route_extras(known, positions + 1 + missing), positions + 1 + missing)
    check_routes(found, shape, "attempt")
    arrived = routes_of(found)
    assert arrived is not None
    np.testing.assert_array_equal(arrived[:positions], known)
    assert (arrived[positions:] == -1).all()  # no one computed them, or no one told


def test_what_they_take() -> None:
    shape = route_shape(QWEN3_30B)
    assert shape == RouteShape(48, tuple(range(48)), 128, 8)
    assert shape.bytes_per_token == 768
    extra = route_extras(routes(shape, 99), 100)["routes"]
    assert extra.nbytes == 100 * 768


BROKEN = {
    "attempt 5/2: routes is missing, and": lambda whole: None,
    r"routes is int32 \[6, 4, 8\], and .* needs int16": lambda whole: whole.astype(np.int32),
    r"routes is int16 \[6, 3, 8\], and .* needs int16 \[6, 4, 8\]": lambda whole: whole[:, 1:],  # the routed alone
    "from -1 to 300 are not all among the model's 300 experts": lambda whole: np.where(
        whole == whole[0, 1, 0], 300, whole
    ),
    "from -2 to": lambda whole: np.where(whole == -1, -2, whole),
    "experts in a layer that has none: they are shifted": lambda whole: np.roll(whole, -1, axis=1),
    "only some experts are known": lambda whole: np.where(np.arange(8) == 3, -1, whole),
    "an expert twice at one place": lambda whole: np.where(np.arange(8) == 3, whole[..., :1], whole),
}


@pytest.mark.parametrize("says", BROKEN)
def test_what_is_broken_is_refused_by_the_attempts_name(says: str) -> None:
    whole = route_extras(routes(SHAPE, 5), 6)["routes"]
    broken = BROKEN[says](whole)
    found = sent({} if broken is None else {"routes": broken}, 6)
    with pytest.raises(TrajectoryError, match=says):
        check_routes(found, SHAPE, "attempt 5/2")


@pytest.mark.parametrize(
    ("config", "routed"),
    [
        ({"mlp_only_layers": [0], "decoder_sparse_step": 1}, (1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"first_k_dense_replace": 3, "n_routed_experts": 9, "num_experts": None}, (3, 4, 5)),
        ({"mlp_layer_types": ["dense", "sparse"] * 3}, (1, 3, 5)),
    ],
)
def test_which_layers_have_experts(config: dict[str, Any], routed: tuple[int, ...]) -> None:
    shape = route_shape(QWEN3_30B | {"num_hidden_layers": 6} | config)
    assert shape is not None
    assert shape.routed == routed
    assert route_shape({"text_config": QWEN3_30B}) == route_shape(QWEN3_30B)
    assert route_shape({"num_hidden_layers": 6}) is None


def made(model: Path, **buffer: int) -> Any:
    return config_from_table(
        {"model": {"path": str(model)}, "task": {"kind": "digit_sort"}, "algorithm": {"router_replay": "rollout"},
         "buffer": buffer}, "test.toml"
    )  # fmt: skip


def test_the_buffer_has_room_for_them_and_a_dense_model_is_refused(tmp_path: Path) -> None:
    elsewhere = made(tmp_path)  # the model is on other machines: nothing can be said here
    with pytest.raises(ConfigError, match=r"config\.json has to say how many layers and experts"):
        batch_bytes(elsewhere)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    config = made(tmp_path)
    tokens = config.buffer.groups_per_step * config.buffer.group_size * config.inference.max_context
    assert batch_bytes(config) > tokens * (768 + 9)
    with pytest.raises(ConfigError, match=r"capacity_bytes = .* is below one batch"):
        made(tmp_path, capacity_bytes=batch_bytes(config) - 1)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match="has no experts, so no routes"):
        check_config(elsewhere)
    with pytest.raises(ConfigError, match="has no experts, so no routes"):
        read_route_shape(tmp_path)

"""Where tokens went in a mixture-of-experts model, as it travels: one extra of a segment, for router replay.

`routes` int16 [n, layers, k]: row t holds, for each decoder layer of the model by its number from the first, the k
experts to which the token at position t went when the policy computed what follows it. Experts have the numbers of the
checkpoint. UNKNOWN in place of all k: in a layer without experts, at the last position, which no one computed, and
wherever else the engine did not tell. The buffer carries it unread.

A token takes 2·layers·k bytes: 768 for 48 layers of which each sends it to 8 experts, beside 9 for its id,
log-probability and mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.schema import ConfigError
from async_rl.trajectory import SegmentArrays, TrajectoryError

ROUTES = "routes"
UNKNOWN = -1
DTYPE = np.dtype("<i2")

# What models call the experts that a token goes to, and the experts of a layer, in config.json.
EXPERTS_EACH = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


ALL_SPARSE_IN_SGLANG = ("qwen2_moe", "qwen3_moe")
SGLANG_SEES_NO_DENSE = (
    "layers {dense} have no experts (mlp_only_layers, decoder_sparse_step), and SGLang gives experts to every layer of "
    "such a model, with whatever lies in memory for weights: serve it with another engine"
)


class RouteShape(NamedTuple):
    """Of a mixture-of-experts model: how many decoder `layers` it has, which of them are `routed` (their numbers),
    the `experts` in each of these, and how many of them `each` token goes to."""

    layers: int
    routed: tuple[int, ...]
    experts: int
    each: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.each * DTYPE.itemsize


def route_shape(config: Mapping[str, Any]) -> RouteShape | None:
    """Of a model's config.json; None for a model without experts."""
    text = config.get("text_config") or config
    each, experts = _first(text, EXPERTS_EACH), _first(text, EXPERTS)
    if not each or not experts:
        return None
    layers = int(text["num_hidden_layers"])
    return RouteShape(layers, tuple(layer for layer in range(layers) if _is_routed(text, layer)), experts, each)


def dense_unseen_by_sglang(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers without experts of a model's config.json that SGLang makes layers with experts of, whose weights it
    then leaves as they lie in memory. By its source (0.5.23, srt/models/qwen3_moe.py and qwen2_moe.py, stage_facts),
    which reads neither mlp_only_layers nor decoder_sparse_step; Qwen3's was seen to be so."""
    if (config.get("text_config") or config).get("model_type") not in ALL_SPARSE_IN_SGLANG:
        return ()  # before its layers are asked for: others name them as they like, and no engine but SGLang is meant
    shape = route_shape(config)
    return () if shape is None else tuple(sorted(set(range(shape.layers)) - set(shape.routed)))


def has_experts(file: Path) -> bool:
    """Whether a config.json is that of a mixture of experts."""
    config = read_config(file)
    text = config.get("text_config") or config
    return bool(_first(text, EXPERTS_EACH) and _first(text, EXPERTS))


def read_config(file: Path) -> dict[str, Any]:
    """A config.json; empty where it cannot be read, which whoever loads the model says."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError):
        return {}


def _first(text: Mapping[str, Any], names: Iterable[str]) -> int:
    return next((int(text[name]) for name in names if text.get(name)), 0)


def _is_routed(text: Mapping[str, Any], layer: int) -> bool:
    """As transformers reads it: kinds of layers by name, DeepSeek's leading dense ones, Qwen's every so many."""
    kinds = text.get("mlp_layer_types")
    if kinds:
        return bool(kinds[layer] == "sparse")
    if layer < (text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (text.get("decoder_sparse_step") or 1) == 0


def read_route_shape(model_path: Path) -> RouteShape:
    """Of a checkpoint in Hugging Face layout. Raises ConfigError when it cannot be read, or has no experts."""
    file = model_path / "config.json"
    try:
        shape = route_shape(msgspec.json.decode(file.read_bytes()))
    except (OSError, KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"[algorithm] router_replay: {file} has to say how many layers and experts the model has, and cannot be "
            f"read: {error!r}. Copy the model's config.json there"
        ) from error
    if shape is None:
        raise ConfigError(
            f'[algorithm] router_replay: the model at {model_path} has no experts, so no routes: set it to "none"'
        )
    return shape


def route_extras(routes: npt.NDArray[np.integer[Any]], n_tokens: int) -> dict[str, npt.NDArray[np.int16]]:
    """The extra of a segment of `n_tokens`, of which the first len(routes) have known routes [.., layers, k]."""
    out = np.full((n_tokens, *routes.shape[1:]), UNKNOWN, dtype=DTYPE)
    out[: len(routes)] = routes
    return {ROUTES: out}


def routes_of(arrays: SegmentArrays) -> npt.NDArray[np.int16] | None:
    """A segment's routes, a view [n, layers, k]; None where it came without."""
    return arrays.extras.get(ROUTES)


def check_routes(arrays: SegmentArrays, shape: RouteShape, what: str) -> None:
    """Raises TrajectoryError, naming `what` the segment is of, when its routes are missing, of another shape or dtype,
    or at one place outside the model's experts, the same expert twice, or known in part."""
    expected = (len(arrays.tokens), shape.layers, shape.each)
    routes = routes_of(arrays)
    if routes is None or routes.dtype != DTYPE or routes.shape != expected:
        has = "missing" if routes is None else f"{routes.dtype} {list(routes.shape)}"
        raise TrajectoryError(
            f'{what}: {ROUTES} is {has}, and [algorithm] router_replay = "rollout" needs int16 {list(expected)}'
        )
    if problem := _problem(routes, shape):
        raise TrajectoryError(f"{what}: {problem}")


def _problem(routes: npt.NDArray[np.int16], shape: RouteShape) -> str:
    if routes.min() < UNKNOWN or routes.max() >= shape.experts:
        return f"{ROUTES} from {routes.min()} to {routes.max()} are not all among the model's {shape.experts} experts"
    dense = np.setdiff1d(np.arange(shape.layers), shape.routed)
    if (routes[:, dense] != UNKNOWN).any():
        return f"{ROUTES} has experts in a layer that has none: they are shifted, or of another model"
    ordered = np.sort(routes[:, list(shape.routed)], axis=2)
    if ((ordered[..., 0] == UNKNOWN) != (ordered[..., -1] == UNKNOWN)).any():
        return f"{ROUTES} has a place of which only some experts are known"
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNKNOWN)).any():
        return f"{ROUTES} has an expert twice at one place"
    return ""

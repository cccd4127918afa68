"""A preallocated KV cache with one row per running request, behind transformers' Cache interface.

Each layer's keys and values are tensors [row, kv_head, position, dim], allocated once. For transformers' forward the
runner announces what comes (`begin_decode`, `begin_prefill`); during it the layers write the new keys and values into
place and hand back views. Sliding-window layers keep the full length too: their mask, not their storage, bounds what
is seen. There is room for one position more than a request may have: code that is compiled for the size of a row and
for any number of positions read would have to treat equal numbers apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from inference.engine import EngineError


class Decode(NamedTuple):
    """One new token for each of rows [start:end), whose first `length` positions are then read. `places` are where
    its keys and values go in a [row * kv_head * position, dim] view, by number of heads."""

    start: int
    end: int
    length: int
    places: dict[int, torch.Tensor]


class Prefill(NamedTuple):
    """Sequences from position 0; sequence `sources[j]` is copied to row `targets[j]`."""

    sources: torch.Tensor
    targets: torch.Tensor


class SlotLayer(CacheLayerMixin):
    """One layer's rows. `plan` is set for all layers at once by the cache, before each forward."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.plan: Decode | Prefill | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states, value_states [batch, kv_head, new positions, dim]."""
        plan = self.plan
        if isinstance(plan, Decode):
            for whole, new in ((self.keys, key_states), (self.values, value_states)):
                heads, dim = whole.shape[1], whole.shape[3]
                whole.view(-1, dim).index_copy_(0, plan.places[heads], new.reshape(-1, dim))
            rows = slice(plan.start, plan.end)
            return self.keys[rows, :, : plan.length], self.values[rows, :, : plan.length]
        if isinstance(plan, Prefill):
            for whole, new in ((self.keys, key_states), (self.values, value_states)):
                part = whole[:, :, : new.shape[2]]
                part.index_copy_(0, plan.targets, new.index_select(0, plan.sources))
            return key_states, value_states
        raise EngineError("the KV cache was used outside a planned forward")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: allocated at construction."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.plan.length if isinstance(self.plan, Decode) else query_length), 0

    def get_seq_length(self) -> int:
        """Rows have lengths of their own; positions and masks are always given, so 0 is only a placeholder."""
        return 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class SlotCache(Cache):
    """All layers' rows. `layer_shapes` gives ((kv_heads, key dim), (kv_heads, value dim)) per layer."""

    def __init__(
        self,
        layer_shapes: list[tuple[tuple[int, int], tuple[int, int]]],
        rows: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = rows
        positions += 1
        self.positions = positions
        # Tensors of one shape share one pool, so that moving rows is one operation for all layers.
        shapes = [shape for layer in layer_shapes for shape in layer]
        self.device = device
        self.pools: dict[tuple[int, int], torch.Tensor] = {
            (heads, dim): torch.zeros(
                shapes.count((heads, dim)), rows, heads, positions, dim, dtype=dtype, device=device
            )
            for heads, dim in dict.fromkeys(shapes)
        }
        unused = {shape: iter(pool) for shape, pool in self.pools.items()}
        super().__init__(layers=[SlotLayer(next(unused[k]), next(unused[v])) for k, v in layer_shapes])
        # Where position 0 of each (row, head) is, in the flat view that Decode.places index.
        self._first_places = {
            heads: torch.arange(0, rows * heads * positions, positions, device=device).view(rows, heads)
            for heads, _ in self.pools
        }

    def begin_decode(self, start: int, end: int, positions: torch.Tensor, length: int) -> None:
        """Row start+i's new token is at `positions[i]`; `length` is the largest of them plus one."""
        places = {
            heads: (firsts[start:end] + positions[:, None]).flatten() for heads, firsts in self._first_places.items()
        }
        self._begin(Decode(start, end, length, places))

    def begin_prefill(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._begin(Prefill(sources, targets))

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `source` to rows `target`; all are read before any is written."""
        for pool in self.pools.values():
            part = pool[:, :, :, :length]
            part[:, target] = part[:, source]  # index_select of such a view took two to five times as long

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    def _begin(self, plan: Decode | Prefill) -> None:
        for layer in self.layers:
            layer.plan = plan


class ShapeProbe(Cache):
    """A cache that only notes the shape of what each layer stores: {layer: ((heads, dim), (heads, dim))}."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_states.shape, value_states.shape
        self.seen[layer_idx] = ((keys[1], keys[3]), (values[1], values[3]))
        return key_states, value_states


def attention_masks(
    queries: torch.Tensor, length: int, windows: Mapping[str, int | None], dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive masks [batch, 1, query, length]: 0 where key position <= query position (and inside the window), the
    dtype's minimum elsewhere. `queries` int64[batch, query] are positions; `windows` maps each layer type to its
    window or None. One tensor for a model with one kind of layer, else a dict by kind."""
    keys, query = torch.arange(length, device=queries.device), queries[:, None, :, None]
    masks = {}
    for kind, window in windows.items():
        hidden = keys > query if window is None else (keys > query) | (keys <= query - window)
        masks[kind] = hidden.to(dtype).mul_(torch.finfo(dtype).min)
    return masks if len(masks) > 1 else masks[next(iter(masks))]

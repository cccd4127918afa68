"""Two ways to run a model over the KV rows: transformers' own forward, and for Llama's family a leaner one.

Both take tensors that lie on the device already, write new keys and values into the rows, and return logits. The lean
one is used only after it has reproduced transformers' logits on a probe.

Suffixes of shapes: n rows, b sequences, t positions of a sequence, v vocabulary. `slot` names the policy.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from inference.compiled_build import StepArguments
from inference.compiled_step import CompileMode, DecodeStep
from inference.decode_step import Draw, sampled
from inference.dense_decoder import forward_sequences
from inference.dense_model import DenseModel, why_not_dense
from inference.engine import EngineError
from inference.kv_slots import ShapeProbe, SlotCache, attention_masks
from inference.model_loading import forward_parameters, layer_windows
from inference.route_cache import RouteCache
from inference.slot_linear import ActiveSlot, low_rank_linear

log = logging.getLogger("engine")

PROBE_TOKENS = 48
# By how much two right forwards may differ, as a share of the largest logit; a wrong mask or rotation differs by more.
PROBE_TOLERANCE = {torch.float32: 1e-4}
PROBE_TOLERANCE_LOW_PRECISION = 0.05


class Forward(Protocol):
    """`routes` of what is in the cache, where they are kept."""

    cache: SlotCache
    vocab: int
    routes: RouteCache | None

    def decode(
        self, slot: int, start: int, ids_n: torch.Tensor, positions_n: torch.Tensor, length: int, draw: Draw
    ) -> torch.Tensor:
        """One token for each of rows [start:start+n), of which `length` positions are read; returns what
        inference.decode_step.sampled does."""

    def prefill(
        self, slot: int, ids_bt: torch.Tensor, last_b: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Logits [b, v] after position last_b of each sequence; sequence sources[j] is stored in row targets[j].
        Sequences are padded at the end."""

    def score(self, slot: int, ids_bt: torch.Tensor) -> torch.Tensor:
        """Logits [b, t, v]; the rows stay as they are."""

    def changed(self, slot: int) -> None:
        """The weights of a slot are others now."""

    def describe(self) -> dict[str, str]:
        """Which forward this is, and how it decodes."""

    def close(self) -> None:
        """Let go of what is under way."""


class TransformersForward:
    """The model as it is. Its linear layers compute with the slot that `active` names."""

    def __init__(
        self, model: PreTrainedModel, config: PreTrainedConfig, active: ActiveSlot, rows: int, positions: int, top: int
    ) -> None:
        self._model, self._config, self._active, self._top = model, config, active, top
        self.why = ""  # it is this one that is used
        self._windows = layer_windows(config)
        self._cache_argument, self._chooses_logits = forward_parameters(model)
        self.routes: RouteCache | None = None
        self.vocab, layer_shapes = self._probe()
        self.cache = SlotCache(layer_shapes, rows, positions, model.dtype, model.device)

    def keep_routes(self) -> None:
        """From now on. Raises EngineError for a model without routers."""
        layers, positions = self._config.num_hidden_layers, self.cache.positions
        self.routes = RouteCache(self._model, layers, self.cache.rows, positions, self._model.device)

    def decode(
        self, slot: int, start: int, ids_n: torch.Tensor, positions_n: torch.Tensor, length: int, draw: Draw
    ) -> torch.Tensor:
        self._active.index = slot
        self.cache.begin_decode(start, start + len(ids_n), positions_n, length)
        logits = self._forward(ids_n[:, None], positions_n[:, None], length, self.cache)[:, -1]
        if self.routes is not None:
            self.routes.decoded(start, positions_n)
        return sampled(logits, draw, self._top)

    def prefill(
        self, slot: int, ids_bt: torch.Tensor, last_b: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        self._active.index = slot
        self.cache.begin_prefill(sources, targets)
        # Logits only at the positions where some sequence ends: a whole prompt's would not fit for a real vocabulary.
        kept, index = torch.unique(last_b, return_inverse=True)
        logits = self._forward(ids_bt, None, ids_bt.shape[1], self.cache, keep=kept)
        if self.routes is not None:
            self.routes.prefilled(ids_bt.shape[1], sources, targets)
        return logits[torch.arange(len(ids_bt), device=ids_bt.device), index]

    def score(self, slot: int, ids_bt: torch.Tensor) -> torch.Tensor:
        self._active.index = slot
        logits = self._forward(ids_bt, None, ids_bt.shape[1], cache=None)
        if self.routes is not None:
            self.routes.forget()
        return logits

    def changed(self, slot: int) -> None:
        """Nothing to do: the layers hold their slots themselves."""

    def describe(self) -> dict[str, str]:
        attention = self._config._attn_implementation
        return {"forward": f"transformers, {attention} attention", "decode": f"eager, not compiled: {self.why}"}

    def close(self) -> None:
        """Nothing is under way."""

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        length: int,
        cache: Cache | None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`positions` None: 0, 1, 2, … for every sequence."""
        queries = torch.arange(length, device=ids.device)[None] if positions is None else positions
        extra: dict[str, Any] = {} if cache is None else {self._cache_argument: cache}
        if keep is not None and self._chooses_logits:
            extra["logits_to_keep"] = keep
        masks = attention_masks(queries, length, self._windows, self._model.dtype)
        out = self._model(
            input_ids=ids, position_ids=queries, attention_mask=masks, use_cache=cache is not None, **extra
        )
        logits: torch.Tensor = out.logits
        return logits if keep is None or self._chooses_logits else logits[:, keep]

    def _probe(self) -> tuple[int, list[tuple[tuple[int, int], tuple[int, int]]]]:
        """Vocabulary size of the logits and shapes of the KV cache, from one forward of one token."""
        probe = ShapeProbe()
        logits = self._forward(torch.zeros(1, 1, dtype=torch.int64, device=self._model.device), None, 1, probe)
        layers = self._config.num_hidden_layers
        if sorted(probe.seen) != list(range(layers)):
            raise EngineError(
                f"model type {self._config.model_type}: layers {sorted(probe.seen)} of {layers} use the KV cache; the "
                "torch engine needs standard attention in every layer"
            )
        return logits.shape[-1], [probe.seen[layer] for layer in range(layers)]


class DenseForward:
    """inference.dense_decoder over the rows of the same cache. It has no experts, so no routes."""

    routes = None

    def __init__(self, dense: DenseModel, step: DecodeStep, cache: SlotCache, vocab: int, positions: int) -> None:
        self._dense, self._step = dense, step
        self.cache, self.vocab = cache, vocab
        self._rotation = dense.rotation(positions)
        self._longer = self._rotation  # for sequences to score that are longer than a row
        self._numbers = torch.arange(positions, device=self._rotation.device)

    def decode(
        self, slot: int, start: int, ids_n: torch.Tensor, positions_n: torch.Tensor, length: int, draw: Draw
    ) -> torch.Tensor:
        rows = self._rows(start, start + len(ids_n))
        weights = self._dense.weights(slot)
        return self._step(
            slot, StepArguments(weights, self._rotation, *rows, ids_n, positions_n, self._numbers[:length], draw)
        )

    def prefill(
        self, slot: int, ids_bt: torch.Tensor, last_b: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        weights = self._dense.weights(slot)
        hidden_btm, stored = forward_sequences(self._dense.shape, weights, self._rotation, ids_bt)
        for rows, new in zip(zip(*self._rows(), strict=True), stored, strict=True):
            for whole, part in zip(rows, new, strict=True):
                whole[:, :, : ids_bt.shape[1]].index_copy_(0, targets, part.index_select(0, sources))
        last_bm = hidden_btm[torch.arange(len(ids_bt), device=ids_bt.device), last_b]
        return low_rank_linear(last_bm, *weights.head)

    def score(self, slot: int, ids_bt: torch.Tensor) -> torch.Tensor:
        if ids_bt.shape[1] > len(self._longer):
            self._longer = self._dense.rotation(ids_bt.shape[1])
        weights = self._dense.weights(slot)
        hidden_btm, _ = forward_sequences(self._dense.shape, weights, self._longer, ids_bt)
        return low_rank_linear(hidden_btm, *weights.head)

    def changed(self, slot: int) -> None:
        self._dense.changed(slot)

    def describe(self) -> dict[str, str]:
        return {"forward": "dense", "decode": self._step.describe()}

    def close(self) -> None:
        self._step.close()

    def _rows(self, start: int = 0, end: int | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of rows [start:end), by layer."""
        layers = self.cache.layers
        return [layer.keys[start:end] for layer in layers], [layer.values[start:end] for layer in layers]


def make_forward(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    active: ActiveSlot,
    rows: int,
    positions: int,
    compile_mode: CompileMode,
    top: int,
    routes: bool = False,
) -> Forward:
    """The lean forward where it is right, else transformers' own, which is never compiled. `top` as in
    inference.decode_step.sampled; with `routes` they are kept. Raises EngineError when there are none."""
    plain = TransformersForward(model, config, active, rows, positions, top)
    if routes:
        plain.keep_routes()
    plain.why = why_not_dense(config) or ""
    if not plain.why:
        try:
            dense = DenseModel(model, config)
            step = DecodeStep(compile_mode, dense.shape, model.device, top)
            lean = DenseForward(dense, step, plain.cache, plain.vocab, positions)
            error = _difference(plain, lean, positions)
        except (AttributeError, RuntimeError) as failure:  # it is not built as its type's name promises
            plain.why = f"{type(failure).__name__}: {failure}"
        else:
            if error <= PROBE_TOLERANCE.get(model.dtype, PROBE_TOLERANCE_LOW_PRECISION):
                return lean
            plain.why = f"our forward and transformers' differ by {error:g} of the largest logit"
        log.warning("model type %s runs slowly, by transformers' forward: %s", config.model_type, plain.why)
    elif compile_mode == "always":
        log.warning("the decode step stays eager: %s", plain.why)
    return plain


def _difference(plain: TransformersForward, lean: DenseForward, positions: int) -> float:
    """The largest difference of the base model's logits on a probe, as a share of the largest logit."""
    length = min(PROBE_TOKENS, positions)
    ids = torch.arange(2 * length, device=plain.cache.device).view(2, length) % plain.vocab
    expected, got = (forward.score(0, ids).float() for forward in (plain, lean))
    return float((got - expected).abs().max() / expected.abs().max())

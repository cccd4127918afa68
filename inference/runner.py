"""Forwards of the model over the KV rows: prefill, decode and scoring, always under one resident policy at a time.

Everything that touches the device is here; the engine above keeps its books in numpy on the host. All shapes and
plans are made before a forward starts, so a compiled step can replace `_forward` without changing its callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from inference.engine import EngineError
from inference.kv_slots import ShapeProbe, SlotCache, attention_masks
from inference.model_loading import forward_parameters, layer_windows, load_model
from inference.slot_linear import ActiveSlot, LowRank, wrap_linears

# Padded tokens in one prefill or scoring forward: bounds the memory of activations and logits.
FORWARD_TOKENS = 16384


class PrefillSequence(NamedTuple):
    """Token ids int32[length >= 1] to compute from position 0, and the rows that receive the keys and values."""

    tokens: npt.NDArray[np.int32]
    rows: list[int]


class ModelRunner:
    """The model, its linear layers with `policy_slots` slots, and `rows` x `positions` of KV cache."""

    def __init__(
        self, path: Path, *, rows: int, positions: int, policy_slots: int, device: torch.device, dtype: str
    ) -> None:
        self.device = device
        self.model = load_model(path, device, dtype)
        self.config = self.model.config.get_text_config(decoder=True)
        self.dtype = self.model.dtype
        self.max_positions = getattr(self.config, "max_position_embeddings", None)
        if self.max_positions is not None and positions > self.max_positions:
            raise EngineError(
                f"max_context is {positions}, but the model at {path} has {self.max_positions} positions "
                "(max_position_embeddings): lower [inference] max_context"
            )
        self.windows = layer_windows(self.config)
        self._cache_argument, self._chooses_logits = forward_parameters(self.model)
        self._active = ActiveSlot()
        self.linears = wrap_linears(self.model, self._active, policy_slots)
        self.vocab, layer_shapes = self._probe()
        # Some models have more logits than embeddings, or the reverse; a token must have both.
        self.input_vocab = min(int(self.model.get_input_embeddings().weight.shape[0]), self.vocab)
        self.cache = SlotCache(layer_shapes, rows, positions, self.dtype, device)

    def load(self, slot: int, adapters: dict[str, LowRank]) -> None:
        """Fill a policy slot with adapters by module name; the other modules stay as the base model has them."""
        with torch.no_grad():
            for name, linear in self.linears.items():
                linear.load(slot, adapters.get(name))

    @torch.no_grad()
    def prefill(self, slot: int, sequences: Sequence[PrefillSequence]) -> torch.Tensor:
        """Compute sequences under a policy slot and store their keys and values; returns the logits after the last
        token of each: [sequence, vocab]."""
        self._active.index = slot
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].tokens))
        logits: list[torch.Tensor] = []
        for chunk in _chunks(order, [len(sequence.tokens) for sequence in sequences]):
            part = [sequences[i] for i in chunk]
            sources = np.repeat(np.arange(len(part)), [len(sequence.rows) for sequence in part])
            targets = np.concatenate([np.asarray(sequence.rows, dtype=np.int64) for sequence in part])
            self.cache.begin_prefill(self._to_device(sources), self._to_device(targets))
            logits.append(self._last_logits([sequence.tokens for sequence in part]))
        return torch.cat(logits)[self._to_device(np.argsort(order))]

    @torch.no_grad()
    def decode(
        self, slot: int, start: int, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """One forward of rows [start:start+n) under a policy slot: tokens int64[n] go to `positions` int64[n];
        returns logits [n, vocab]."""
        self._active.index = slot
        length = int(positions.max()) + 1
        both = self._to_device(np.stack((tokens, positions)))
        ids, queries = both[0][:, None], both[1][:, None]
        self.cache.begin_decode(start, start + len(tokens), both[1], length)
        masks = attention_masks(queries, length, self.windows, self.dtype)
        return self._forward(ids, queries, masks, self.cache)[:, -1]

    @torch.no_grad()
    def score(self, slot: int, sequences: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """Log-probability at temperature 1 of every token but the first, under a policy slot; leaves the KV rows as
        they are."""
        self._active.index = slot
        scores: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(sequences)
        lengths = [len(sequence) for sequence in sequences]
        for chunk in _chunks(sorted(range(len(sequences)), key=lengths.__getitem__), lengths):
            ids, queries, masks = self._padded([sequences[i] for i in chunk])
            logits = self._forward(ids, queries, masks, cache=None)
            logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids[:, 1:, None])[..., 0]
            for i, row in zip(chunk, logprobs.cpu().numpy(), strict=True):
                scores[i] = row[: lengths[i] - 1].copy()
        return scores

    def move_rows(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], length: int) -> None:
        """Copy the first `length` positions of KV rows."""
        if len(source) and length:
            self.cache.move(self._to_device(source), self._to_device(target), length)

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: torch.Tensor | dict[str, torch.Tensor],
        cache: Cache | None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        extra: dict[str, Any] = {} if cache is None else {self._cache_argument: cache}
        if keep is not None and self._chooses_logits:
            extra["logits_to_keep"] = keep
        out = self.model(
            input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=cache is not None, **extra
        )
        logits = out.logits
        return logits if keep is None or self._chooses_logits else logits[:, keep]

    def _last_logits(self, sequences: Sequence[npt.NDArray[np.int32]]) -> torch.Tensor:
        ids, queries, masks = self._padded(sequences)
        last = np.array([len(tokens) - 1 for tokens in sequences])
        # Logits only at the positions where some sequence ends: a whole prompt's would not fit for a real vocabulary.
        kept, index = np.unique(last, return_inverse=True)
        logits = self._forward(ids, queries, masks, self.cache, keep=self._to_device(kept))
        return logits[torch.arange(len(sequences), device=self.device), self._to_device(index)]

    def _padded(
        self, sequences: Sequence[npt.NDArray[np.int32]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | dict[str, torch.Tensor]]:
        """Ids [batch, length] padded at the end, which causal masks hide; positions [1, length]; masks."""
        length = max(len(tokens) for tokens in sequences)
        ids = np.zeros((len(sequences), length), dtype=np.int64)
        for row, tokens in zip(ids, sequences, strict=True):
            row[: len(tokens)] = tokens
        queries = torch.arange(length, device=self.device)[None]
        return self._to_device(ids), queries, attention_masks(queries, length, self.windows, self.dtype)

    @torch.no_grad()
    def _probe(self) -> tuple[int, list[tuple[tuple[int, int], tuple[int, int]]]]:
        """Vocabulary size of the logits and shapes of the KV cache, from one forward of one token."""
        probe = ShapeProbe()
        ids, queries, masks = self._padded([np.zeros(1, dtype=np.int32)])
        logits = self._forward(ids, queries, masks, probe)
        layers = self.config.num_hidden_layers
        if sorted(probe.seen) != list(range(layers)):
            raise EngineError(
                f"model type {self.config.model_type}: layers {sorted(probe.seen)} of {layers} use the KV cache; the "
                "torch engine needs standard attention in every layer"
            )
        return logits.shape[-1], [probe.seen[layer] for layer in range(layers)]

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _chunks(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Split indices, sorted by length, so that each chunk's padded size stays within FORWARD_TOKENS (or is one)."""
    chunks: list[list[int]] = []
    for i in order:
        if chunks and (len(chunks[-1]) + 1) * lengths[i] <= FORWARD_TOKENS:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks

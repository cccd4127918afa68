"""Forwards of the model over the KV rows: prefill, decode and scoring, always under one resident policy at a time.

Everything that touches the device is here and below; the engine above keeps its books in numpy on the host, and gets
sampled tokens back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from inference.compiled_step import CompileMode
from inference.decode_step import Draw, sampled
from inference.engine import EngineError
from inference.exact_shapes import BLOCK, Block, blocks, why_not_exact
from inference.forwards import make_forward
from inference.model_loading import load_model
from inference.slot_experts import SlotExperts, wrap_experts
from inference.slot_linear import ActiveSlot, LowRank, SlotLinear, wrap_linears

# Padded tokens in one prefill or scoring forward: bounds the memory of activations and logits.
FORWARD_TOKENS = 16384

IntArray = npt.NDArray[np.int64]
Sampled = npt.NDArray[np.float64]


class Draws(NamedTuple):
    """How to sample each of n rows: temperature float64[n], 1 where greedy; greedy int64[n], 0 or 1; uniforms
    float64[n]."""

    temperature: npt.NDArray[np.float64]
    greedy: IntArray
    uniforms: npt.NDArray[np.float64]

    def part(self, start: int, end: int) -> Draws:
        return Draws(self.temperature[start:end], self.greedy[start:end], self.uniforms[start:end])


class ModelRunner:
    """The model, its linear layers and experts with `policy_slots` slots, and `rows` x `positions` of KV cache.
    `exact`: the bits of a row's results do not depend on the other rows (inference.exact_shapes); raises EngineError
    where they would. `top`: how many of the likeliest tokens come with each that is sampled
    (inference.decode_step.sampled). `routes`: of what is in the KV cache they are kept (inference.route_cache)."""

    def __init__(
        self,
        path: Path,
        *,
        rows: int,
        positions: int,
        policy_slots: int,
        device: torch.device,
        dtype: str,
        compile_mode: CompileMode,
        exact: bool = False,
        top: int = 0,
        routes: bool = False,
    ) -> None:
        self.device = device
        self._exact, self._top = exact, top
        if exact:
            # Room for a whole block, and a position that no request has.
            rows, positions = max(rows, BLOCK), positions + 1
        self._positions = positions
        self.model = load_model(path, device, dtype)
        self.config = self.model.config.get_text_config(decoder=True)
        self.dtype = self.model.dtype
        if exact and (problem := why_not_exact(device, self.dtype)):
            raise EngineError(problem)
        self.max_positions = getattr(self.config, "max_position_embeddings", None)
        if self.max_positions is not None and positions > self.max_positions:
            spare = " with the one to spare of run.deterministic" if exact else ""
            raise EngineError(
                f"max_context is {positions}{spare}, but the model at {path} has {self.max_positions} positions "
                "(max_position_embeddings): lower [inference] max_context"
            )
        active = ActiveSlot()
        self.linears = wrap_linears(self.model, active, policy_slots)
        self.experts = wrap_experts(self.model, active, policy_slots)
        if exact and self.experts:
            raise EngineError(
                f"the model at {path} is a mixture of experts, where a row's bits depend on how many others go to its "
                "expert: run.deterministic is not for it"
            )
        with torch.no_grad():
            self.forward = make_forward(self.model, self.config, active, rows, positions, compile_mode, top, routes)
        self.cache, self.vocab = self.forward.cache, self.forward.vocab
        # Some models have more logits than embeddings, or the reverse; a token must have both.
        self.input_vocab = min(self.model.get_input_embeddings().weight.shape[0], self.vocab)

    def load(self, slot: int, adapters: dict[str, LowRank]) -> None:
        """Fill a policy slot with adapters by the name of the module, or of the experts' projection; what else there is
        stays as the base model has it."""
        layers: dict[str, SlotLinear | SlotExperts] = {**self.linears, **self.experts}
        with torch.no_grad():
            for name, layer in layers.items():
                layer.load(slot, adapters.get(name))
        self.forward.changed(slot)

    def changed(self) -> None:
        """The model's own weights are others now (there is one policy slot)."""
        self.forward.changed(0)

    @torch.inference_mode()
    def prefill(self, slot: int, sequences: Sequence[npt.NDArray[np.int32]], rows: IntArray, draws: Draws) -> Sampled:
        """For each of n rows: compute its sequence from position 0 under a policy slot, store the keys and values, and
        sample the token that follows: see inference.decode_step.sampled. Equal sequences are computed once."""
        distinct = {tokens.tobytes(): tokens for tokens in sequences}
        number = {key: i for i, key in enumerate(sorted(distinct, key=len))}
        members = np.array([number[tokens.tobytes()] for tokens in sequences])
        ordered = [distinct[key] for key in number]
        logits = [
            self._prefill_chunk(slot, ordered[chunk.start : chunk.stop], members - chunk.start, rows)
            for chunk in _chunks([len(tokens) for tokens in ordered], 0 if self._exact else FORWARD_TOKENS)
        ]
        logits_nv = torch.cat(logits)[self._to_device(members)]
        if self._exact:
            return self._sample_in_blocks(logits_nv, draws)
        return self._to_host(sampled(logits_nv, self._draw(draws), self._top))

    def _prefill_chunk(
        self, slot: int, sequences: Sequence[npt.NDArray[np.int32]], members: IntArray, rows: IntArray
    ) -> torch.Tensor:
        """Row rows[j] is of sequence members[j], if there is one of that number here; logits [sequence, vocab]."""
        here = (members >= 0) & (members < len(sequences))
        last = np.array([len(tokens) - 1 for tokens in sequences])
        places = (self._to_device(array) for array in (last, members[here], rows[here]))
        return self.forward.prefill(slot, self._padded(sequences), *places)

    @torch.inference_mode()
    def decode(self, slot: int, start: int, tokens: IntArray, positions: IntArray, draws: Draws) -> Sampled:
        """One token for each of rows [start:start+n) under a policy slot: tokens int64[n] go to `positions` int64[n].
        Returns what inference.decode_step.sampled does."""
        if self._exact:
            whole = range(start, start + len(tokens))
            parts = [
                self._decode_block(slot, block, tokens, positions, draws) for block in blocks(whole, self.cache.rows)
            ]
            return np.concatenate(parts, axis=1)
        ids, places = self._to_device(np.stack((tokens, positions)))
        length = int(positions.max()) + 1
        return self._to_host(self.forward.decode(slot, start, ids, places, length, self._draw(draws)))

    def _decode_block(self, slot: int, block: Block, tokens: IntArray, positions: IntArray, draws: Draws) -> Sampled:
        """As `decode`, for those of its rows that `block` names. The other rows of the block decode token 0 in vain, at
        the position that no request has."""
        ids = self._to_device(block.filled(tokens, 0))
        places = self._to_device(block.filled(positions, self._positions - 1))
        draw = self._draw(block_draws(block, draws))
        return self._to_host(self.forward.decode(slot, block.start, ids, places, self._positions, draw))[:, block.used]

    def _sample_in_blocks(self, logits_nv: torch.Tensor, draws: Draws) -> Sampled:
        parts = []
        for block in blocks(range(len(logits_nv)), max(len(logits_nv), BLOCK)):
            logits_bv = logits_nv.new_zeros(BLOCK, logits_nv.shape[1])
            logits_bv[block.used] = logits_nv[block.source]
            draw = self._draw(block_draws(block, draws))
            parts.append(self._to_host(sampled(logits_bv, draw, self._top))[:, block.used])
        return np.concatenate(parts, axis=1)

    @torch.inference_mode()
    def score(self, slot: int, sequences: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """Log-probability at temperature 1 of every token but the first, under a policy slot; leaves the KV rows as
        they are."""
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        scores: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(sequences)
        for chunk in _chunks([len(sequences[i]) for i in order], FORWARD_TOKENS):
            ids = self._padded([sequences[order[j]] for j in chunk])
            logits = self.forward.score(slot, ids)
            logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids[:, 1:, None])[..., 0]
            for j, row in zip(chunk, logprobs.cpu().numpy(), strict=True):
                scores[order[j]] = row[: len(sequences[order[j]]) - 1].copy()
        return scores

    def move_rows(self, source: IntArray, target: IntArray, length: int) -> None:
        """Copy the first `length` positions of KV rows."""
        if len(source) and length:
            on_device = self._to_device(source), self._to_device(target)
            self.cache.move(*on_device, length)
            if self.forward.routes is not None:
                self.forward.routes.move(*on_device, length)

    def routes_of(self, row: int, length: int) -> npt.NDArray[np.int16] | None:
        """Where the first `length` positions of a row went, [length, layers, k], where that is kept."""
        return None if self.forward.routes is None else self.forward.routes.of(row, length)

    def _padded(self, sequences: Sequence[npt.NDArray[np.int32]]) -> torch.Tensor:
        """Ids [batch, length] padded at the end, which causal masks hide."""
        ids = np.zeros((len(sequences), max(len(tokens) for tokens in sequences)), dtype=np.int64)
        for row, tokens in zip(ids, sequences, strict=True):
            row[: len(tokens)] = tokens
        return self._to_device(ids)

    def _draw(self, draws: Draws) -> Draw:
        temperature, greedy, uniforms = self._to_device(np.stack(draws))
        return Draw(temperature.float(), greedy.bool() if draws.greedy.any() else None, uniforms)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _to_host(self, tensor: torch.Tensor) -> Sampled:
        array: Sampled = tensor.cpu().numpy()
        return array


def block_draws(block: Block, draws: Draws) -> Draws:
    """Those of a block's rows; of those in vain at temperature 1."""
    return Draws(block.filled(draws.temperature, 1.0), block.filled(draws.greedy, 0), block.filled(draws.uniforms, 0.0))


def _chunks(lengths: Sequence[int], most: int) -> list[range]:
    """Ranges over ascending lengths, so that each one's padded size stays within `most` tokens (or it is one)."""
    chunks: list[range] = []
    for i, length in enumerate(lengths):
        start = chunks[-1].start if chunks else 0
        if chunks and (i + 1 - start) * length <= most:
            chunks[-1] = range(start, i + 1)
        else:
            chunks.append(range(i, i + 1))
    return chunks

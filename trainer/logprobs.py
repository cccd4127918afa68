"""Log-probabilities of given tokens under a causal language model, computed only where they are wanted.

A `Scorer` finds out once, when the model is loaded, how this model can be computed: its sequences packed into one row
or padded to the longest, its logits a chunk of tokens at a time or all at once. Both are decided by comparing numbers,
not by the model's name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from async_rl.errors import AsyncRLError
from async_rl.policy.routers import find_routers
from trainer.head import CHUNK_BYTES, Mixture, head_logprobs, head_logprobs_and_mean, mean_of, selected
from trainer.packed_attention import NAME, Layout, Unpackable, make_layout
from trainer.packing import pack
from trainer.replay_torch import Replay
from trainer.route_rows import flat_routes

PAD = 0  # any valid id: padding is on the right, where causal attention keeps real tokens from seeing it
TOLERANCE = 1e-5  # nats between packed and padded, or four times what padding alone changes
CHECK_LENGTHS = (19, 7, 13, 19, 4)  # of the random sequences that decide; two alike, so that one call has several rows

log = logging.getLogger("trainer")


class Rows(NamedTuple):
    """A micro-batch on the device: ids int64, and for each wanted token its predecessor's place in the flattened ids
    (`position`) and its id (`target`): int64 [n] each, in the order that was asked for. Packed: ids [1, tokens] with
    `position_ids` [1, tokens] and `layout`. Padded: ids [rows, longest], the others None. `spans`: where the computed
    part of each sequence lies in the flattened ids, (start, length), in the order that was asked for. `routes`: where
    each of the flattened ids goes, int16 [tokens, layers, k] (trainer.replay_torch); None leaves it to the routers."""

    ids: torch.Tensor
    position: torch.Tensor
    target: torch.Tensor
    position_ids: torch.Tensor | None = None
    layout: Layout | None = None
    spans: tuple[tuple[int, int], ...] = ()
    routes: torch.Tensor | None = None


Routes = Sequence[npt.NDArray[np.int16] | None]
"""Of each sequence its routes [tokens, layers, k], or None where they are not known."""


def padded_rows(
    tokens: Sequence[npt.NDArray[np.int32]],
    wanted: Sequence[npt.NDArray[np.intp]],
    device: torch.device,
    routes: Routes = (),
) -> Rows:
    """`wanted` are the indices (≥ 1, rising, at least one) of the tokens of each row whose log-probability is needed.
    What comes after the predecessor of the last wanted one is not computed at all."""
    lengths = [int(indices[-1]) for indices in wanted]
    ids = np.full((len(tokens), max(lengths)), PAD, dtype=np.int64)
    for row, (sequence, length) in enumerate(zip(tokens, lengths, strict=True)):
        ids[row, :length] = sequence[:length]
    start = [row * ids.shape[1] for row in range(len(tokens))]
    spans = tuple(zip(start, lengths, strict=True))
    on_device = _on_device(device, ids, *_places(tokens, wanted, start))
    return Rows(*on_device, spans=spans, routes=_flat_routes(routes, spans, ids.size, device))


def packed_rows(
    tokens: Sequence[npt.NDArray[np.int32]],
    wanted: Sequence[npt.NDArray[np.intp]],
    device: torch.device,
    routes: Routes = (),
) -> Rows:
    """The same without padding: all sequences in one row, longest first."""
    lengths = np.array([indices[-1] for indices in wanted], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    start = np.empty_like(lengths)
    start[order] = np.cumsum(lengths[order]) - lengths[order]
    ids = np.concatenate([tokens[row][: lengths[row]] for row in order])[None]
    position_ids = np.concatenate([np.arange(lengths[row]) for row in order])[None]
    places = _places(tokens, wanted, start.tolist())
    on_device = _on_device(device, ids, *places, position_ids)
    spans = tuple(zip(start.tolist(), lengths.tolist(), strict=True))
    flat = _flat_routes(routes, spans, ids.size, device)
    return Rows(*on_device, layout=make_layout(lengths[order].tolist(), device), spans=spans, routes=flat)


def _flat_routes(
    routes: Routes, spans: Sequence[tuple[int, int]], total: int, device: torch.device
) -> torch.Tensor | None:
    flat = flat_routes(routes, spans, total) if routes else None
    return None if flat is None else torch.from_numpy(flat).to(device)


def _places(
    tokens: Sequence[npt.NDArray[np.int32]], wanted: Sequence[npt.NDArray[np.intp]], start: Sequence[int]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    position = np.concatenate([first + indices - 1 for first, indices in zip(start, wanted, strict=True)])
    target = np.concatenate([sequence[indices] for sequence, indices in zip(tokens, wanted, strict=True)])
    return position, target


def _on_device(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(array.astype(np.int64, copy=False)).to(device) for array in arrays]


class Scorer:
    """The forward pass of `model` (a transformers causal language model, in eval mode, on its device). With `packing`
    "auto" its sequences are packed if the log-probabilities are then those of padded rows; `packed` and `chunked` say
    what was found. With `replay` (of this model) tokens go where `Rows.routes` says. Raises AsyncRLError for a model
    without an output head."""

    def __init__(self, model: Any, packing: Literal["auto", "never"] = "auto", replay: Replay | None = None) -> None:
        self.model = model
        self._replay = replay
        self.device = next(model.parameters()).device
        self.head = output_head(model)
        self.chunk_bytes = CHUNK_BYTES
        self.packed = False
        self.chunked = False
        why = _logits_are_not_the_heads(self)
        self.chunked = not why
        if why:
            log.info("output head: all logits of a micro-batch at once (%s)", why)
        if packing == "auto":
            why = self._try_packing()
            log.info("micro-batches: %s", f"padded rows ({why})" if why else "packed, without padding")

    def split(self, lengths: Sequence[int], attempts: Sequence[int], budget: int) -> list[list[int]]:
        """Micro-batches of at most `budget` tokens computed (see `trainer.packing.pack`)."""
        return pack(lengths, attempts, budget, padded=not self.packed)

    def rows(
        self,
        tokens: Sequence[npt.NDArray[np.int32]],
        wanted: Sequence[npt.NDArray[np.intp]],
        routes: Routes = (),
    ) -> Rows:
        """The micro-batch of these sequences; `wanted` as in `padded_rows`, `routes` of each sequence, if any."""
        return (packed_rows if self.packed else padded_rows)(tokens, wanted, self.device, routes)

    def logprobs(self, rows: Rows, temperature: float) -> torch.Tensor:
        """Log-probability of each wanted token, [n], at `temperature`, in float32 (or wider if the model is): logits
        are divided by the temperature and normalised in that dtype. Differentiable unless under no_grad."""
        if not self.chunked:
            return selected(self.all_logits(rows), rows.target, temperature)
        return head_logprobs(self.hidden(rows), self.head, rows.target, temperature, self.chunk_bytes)

    def logprobs_and_mean(self, rows: Rows, mixture: Mixture, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs`, and at each wanted token's place the mean Σ_j w_j log π(j) over the tokens of its mixture: [n]
        both, from one pass."""
        if not self.chunked:
            logits = self.all_logits(rows)
            return selected(logits, rows.target, temperature), mean_of(logits, mixture, temperature)
        hidden = self.hidden(rows)
        return head_logprobs_and_mean(hidden, self.head, rows.target, mixture, temperature, self.chunk_bytes)

    def hidden(self, rows: Rows) -> torch.Tensor:
        """What the head takes at the place of each wanted token: [n, width]."""
        with self._replaying(rows):
            hidden = _decoder(self.model)(**_inputs(rows)).last_hidden_state
        wanted: torch.Tensor = hidden.reshape(-1, hidden.shape[-1])[rows.position]
        return wanted

    def all_logits(self, rows: Rows) -> torch.Tensor:
        """[n, vocabulary], of all wanted tokens."""

        # A hook that leaves the head only what is wanted, instead of calling the head ourselves, keeps what a model
        # does to its logits afterwards (scaling, soft caps).
        def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = args[0]
            return (hidden.reshape(1, -1, hidden.shape[-1])[:, rows.position], *args[1:])

        handle = self.head.register_forward_pre_hook(gather)
        try:
            with self._replaying(rows):
                logits = self.model(**_inputs(rows)).logits
        finally:
            handle.remove()
        of_all: torch.Tensor = logits[0]
        return of_all

    def _replaying(self, rows: Rows) -> AbstractContextManager[None]:
        return nullcontext() if self._replay is None else self._replay.serving(rows.routes)

    @torch.no_grad()
    def _try_packing(self) -> str:
        """Switch the model to packed attention if its log-probabilities stay what they are; else why not."""
        before = self.model.config._attn_implementation
        tokens, changed = _check_sequences(vocabulary_size(self.model))
        wanted = [np.arange(1, len(sequence)) for sequence in tokens]
        padded = self.logprobs(padded_rows(tokens, wanted, self.device), 1.0)
        alone = [
            self.logprobs(padded_rows([row], [where], self.device), 1.0)
            for row, where in zip(tokens, wanted, strict=True)
        ]
        allowed = max(TOLERANCE, 4 * float((torch.cat(alone) - padded).abs().max()))
        try:
            self.model.set_attn_implementation(NAME)
            if self.model.config._attn_implementation != NAME:
                raise Unpackable("its attention is not exchangeable")
            packed = self.logprobs(packed_rows(tokens, wanted, self.device), 1.0)
            other = self.logprobs(packed_rows(changed, wanted, self.device), 1.0)
            gap = float((packed - padded).abs().max())
            if not gap <= allowed:
                raise Unpackable(f"packed log-probabilities differ by {gap:.2g} nats")
            # With experts, which tokens are multiplied together depends on all of them, and with that the rounding.
            seen = float((packed - other)[len(wanted[0]) :].abs().max())
            if seen > (TOLERANCE if find_routers(self.model) else 0):
                raise Unpackable("packed sequences see each other")
        except (Unpackable, TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            self.model.set_attn_implementation(before)
            return str(error)
        self.packed = True
        return ""


def output_head(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise AsyncRLError(f"model {type(model).__name__}: no output head (lm_head), so it is not a language model")
    return head


def vocabulary_size(model: Any) -> int:
    """Some models have more logits than embeddings, or the reverse; a token must have both."""
    return int(min(model.get_input_embeddings().weight.shape[0], output_head(model).weight.shape[0]))


def _decoder(model: Any) -> nn.Module:
    """What comes before the head."""
    decoder: nn.Module = model.base_model
    return decoder


def _inputs(rows: Rows) -> dict[str, Any]:
    # No attention mask: with padding on the right, the causal one is enough (and the fast path of SDPA).
    inputs: dict[str, Any] = {"input_ids": rows.ids, "use_cache": False}
    if rows.layout is not None:
        inputs |= {"position_ids": rows.position_ids, "layout": rows.layout}
    return inputs


def _check_sequences(
    vocabulary: int,
) -> tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.int32]]]:
    """Random sequences, and the same with another first one of the same length."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, vocabulary, length).astype(np.int32) for length in CHECK_LENGTHS]
    return tokens, [(tokens[0] + 1) % vocabulary, *tokens[1:]]


@torch.no_grad()
def _logits_are_not_the_heads(scorer: Scorer) -> str:
    """Whether the model does anything between decoder and head, or to the logits after the head; "" if not. The head's
    output is enlarged meanwhile, so that a soft cap shows on a model of small logits too."""
    model, head = scorer.model, scorer.head
    tokens, _ = _check_sequences(vocabulary_size(model))
    rows = padded_rows(tokens, [np.arange(1, len(sequence)) for sequence in tokens], scorer.device)
    seen: dict[str, torch.Tensor] = {}

    def enlarge(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        large = out.float() * (1000.0 / out.float().abs().max().clamp(min=1e-30))
        seen["hidden"], seen["logits"] = args[0], large.to(out.dtype)
        return seen["logits"]

    handle = head.register_forward_hook(enlarge)
    try:
        logits = model(**_inputs(rows)).logits
        hidden = getattr(_decoder(model)(**_inputs(rows)), "last_hidden_state", None)
    finally:
        handle.remove()
    if hidden is None or not torch.equal(hidden, seen["hidden"]):
        return "the model changes hidden states before its head"
    if not torch.equal(logits, seen["logits"].to(logits.dtype)):
        return "the model changes logits after its head"
    return ""

"""Attention over sequences that lie behind one another in one row, each seeing only itself.

Registered with transformers under NAME, so that any model with its attention interface can use it. A model is called
with `ids` [1, n], `position_ids` [1, n] that begin anew with each sequence, and a keyword `layout`, which the model
hands through to here. Linear layers, norms and the head then compute no padding at all; attention alone does, a little
(see `WASTE`), because one call for many short sequences costs less than a call for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "packed"
WASTE = 1.25  # padded tokens of a block for each real one, at most: what padding costs against one more call
ALONE = 512  # tokens; longer sequences have calls of their own, because their attention costs more than a call does


class Unpackable(Exception):
    """This model's attention is not the plain causal one, so it cannot be computed here; the message says why."""


class Block(NamedTuple):
    """Neighbouring sequences that one call computes, as [rows, longest]: `spread` [rows · longest] are the places in
    the block's tokens that fill it (padding repeats a row's first token), `gather` [tokens] the places in it that are
    real, both int64. Both are None when all the lengths are equal."""

    start: int
    tokens: int
    rows: int
    longest: int
    spread: torch.Tensor | None
    gather: torch.Tensor | None


class Layout(NamedTuple):
    """All sequences of a row, in its order."""

    blocks: tuple[Block, ...]


def make_layout(lengths: Sequence[int], device: torch.device) -> Layout:
    """Blocks of sequences that lie behind one another; the fewer, the better the lengths are sorted, longest first."""
    blocks, start, first = [], 0, 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or not _fit(lengths[first : end + 1]):
            block = _block(start, np.asarray(lengths[first:end], dtype=np.int64), device)
            blocks.append(block)
            start, first = start + block.tokens, end
    return Layout(tuple(blocks))


def _fit(lengths: Sequence[int]) -> bool:
    longest = max(lengths)
    return longest <= ALONE and longest * len(lengths) <= WASTE * sum(lengths)


def _block(start: int, lengths: npt.NDArray[np.int64], device: torch.device) -> Block:
    rows, longest, tokens = len(lengths), int(lengths.max()), int(lengths.sum())
    if rows * longest == tokens:
        return Block(start, tokens, rows, longest, None, None)
    column = np.arange(longest)
    real = column < lengths[:, None]
    first = np.cumsum(lengths) - lengths
    spread = np.where(real, first[:, None] + column, first[:, None]).reshape(-1)
    gather = np.flatnonzero(real)
    on_device = (torch.from_numpy(index).to(device) for index in (spread, gather))
    return Block(start, tokens, rows, longest, *on_device)


class _Take(torch.autograd.Function):
    """values[index] along the first dimension. Its gradient is gradient[inverse] if there is an `inverse`, else each
    row's goes back to its place: autograd's own adds row by row, because it cannot know that no two meet."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor | None) -> torch.Tensor:
        ctx.index, ctx.inverse, ctx.shape = index, inverse, values.shape
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if ctx.inverse is not None:
            return gradient.index_select(0, ctx.inverse), None, None
        return gradient.new_zeros(ctx.shape).index_copy_(0, ctx.index, gradient), None, None


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, n, d], key and value [1, kv heads, n, d] → [1, n, heads, d].
    Without a `layout` it is plain causal attention. Raises Unpackable for what it does not know."""
    _refuse_what_is_not_plain(attention_mask, options)
    plain = {"scaling": options.get("scaling"), "dropout": options.get("dropout", 0.0), "is_causal": True}
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, None, **plain)
    parts = []
    for block in layout.blocks:
        inputs = (_rows(tensor, block) for tensor in (query, key, value))
        out, _ = sdpa_attention_forward(module, *inputs, None, **plain)
        out = out.reshape(block.rows * block.longest, *out.shape[2:])
        if block.gather is not None:
            out = _Take.apply(out, block.gather, None)
        parts.append(out)
    return torch.cat(parts)[None], None


def _rows(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """A block of [1, heads, n, d] as [rows, heads, longest, d]."""
    part = tensor[0, :, block.start : block.start + block.tokens]
    if block.rows == 1:
        return part[None]
    part = part.transpose(0, 1)
    if block.spread is not None:
        # Padding's gradient is zero (nothing sees it), so that of the real places is all there is.
        part = _Take.apply(part, block.spread, block.gather)
    return part.reshape(block.rows, block.longest, *part.shape[1:]).transpose(1, 2)


def _refuse_what_is_not_plain(attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise Unpackable("it masks its attention itself")
    for option in ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(option) is not None:
            raise Unpackable(f"its attention has a {option}")
    if options.get("is_causal") is False:
        raise Unpackable("its attention is not causal")


def packed_mask(*, local_size: int | None = None, use_vmap: bool = False, **_options: Any) -> None:
    """transformers' mask function for NAME: none is needed, because the layout says who sees whom."""
    if local_size is not None:
        raise Unpackable(f"its attention sees only the last {local_size} tokens")
    if use_vmap:
        raise Unpackable("its attention mask is one of its own")


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, packed_mask)

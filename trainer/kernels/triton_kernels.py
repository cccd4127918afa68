"""The two products of a sketched layer as Triton kernels: x·signᵀ with signs drawn inside, and S += gᵀ·P in float32.

A projection is never stored: each tile of x draws the signs it needs, 128 to a Philox call. Import this module only
where Triton is installed; trainer/kernels/sketching.py chooses.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from async_rl.policy.kernels import sign_bits, words
from async_rl.policy.philox import Key

TILE_TOKENS = 64
TILE_COLUMNS = 128  # one Philox call a row of the projection
TILE_ROWS = 64
MAX_TILE_RANK = 128
MAX_WIDE_TILE_RANK = 64  # of a projection in float32: signs are float32 there, and twice as many registers
WARPS = 8  # with fewer the signs of a tile do not fit into the registers
STAGES = 3
MAX_SPLITS = 8
ENOUGH_TILES = 256  # about two for each multiprocessor of a large GPU


@triton.jit(do_not_specialize=["key0", "key1"])
def _project_kernel(
    x: tl.tensor,
    projected: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    rank: tl.tensor,
    x_token: tl.tensor,
    x_column: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    start: tl.tensor,
    operand: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rank: tl.constexpr,
) -> None:
    """One tile of P [tokens, rank], contiguous: the sum over columns of x [tokens, columns], of any strides."""
    token = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    first_rank = tl.program_id(1) * tile_rank
    place = first_rank + tl.arange(0, tile_rank)
    key0, key1 = key0.to(tl.uint32), key1.to(tl.uint32)
    first_call = start // tile_columns
    total = tl.zeros([tile_tokens, tile_rank], tl.float32)
    for call in range(first_call, tl.cdiv(start + columns, tile_columns)):
        bits = sign_bits(key0, key1, call, first_rank, tile_rank, tile_columns)
        sign = (2 * bits.to(tl.int32) - 1).to(operand)
        column = call * tile_columns - start + tl.arange(0, tile_columns)
        inside = (token < tokens)[:, None] & ((column >= 0) & (column < columns))[None, :]
        places = x + token.to(tl.int64)[:, None] * x_token + column[None, :] * x_column
        values = tl.load(places, mask=inside, other=0.0).to(operand)
        # In two parts: the 11 bits that TF32 holds, and the 13 below, of which it cuts off the last two: 2⁻²² of the
        # value at most, no more than a sum in float32 loses. A sign is one bit.
        if operand == tl.float32:
            upper = (values.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
            total = tl.dot(values - upper, tl.trans(sign), total, input_precision="tf32")
            total = tl.dot(upper, tl.trans(sign), total, input_precision="tf32")
        else:
            total = tl.dot(values, tl.trans(sign), total)
    places = projected + token.to(tl.int64)[:, None] * rank + place[None, :]
    tl.store(places, total.to(projected.dtype.element_ty), mask=(token < tokens)[:, None] & (place < rank)[None, :])


@triton.jit
def _accumulate_kernel(
    partial: tl.tensor,
    gradient: tl.tensor,
    projected: tl.tensor,
    bounds: tl.tensor | None,
    tokens: tl.tensor,
    rows: tl.tensor,
    rank: tl.tensor,
    gradient_token: tl.tensor,
    gradient_row: tl.tensor,
    tokens_a_split: tl.tensor,
    scale: tl.tensor,
    add: tl.constexpr,
    operand: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_rank: tl.constexpr,
) -> None:
    """One tile of one split's sum over its tokens: partial [splits, rows, rank] is set, or with `add` added to. Splits
    are of equal length, or begin and end where `bounds` [splits + 1] says."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    place = tl.program_id(1) * tile_rank + tl.arange(0, tile_rank)
    split = tl.program_id(2)
    if bounds is None:
        begin = split * tokens_a_split
        end = tl.minimum(begin + tokens_a_split, tokens)
    else:
        begin, end = tl.load(bounds + split), tl.load(bounds + split + 1)
    total = tl.zeros([tile_rows, tile_rank], tl.float32)
    for first in range(begin, end, tile_tokens):
        token = first + tl.arange(0, tile_tokens)
        g = tl.load(
            gradient + token.to(tl.int64)[:, None] * gradient_token + row[None, :] * gradient_row,
            mask=(token < end)[:, None] & (row < rows)[None, :],
            other=0.0,
        )
        p = tl.load(
            projected + token.to(tl.int64)[:, None] * rank + place[None, :],
            mask=(token < end)[:, None] & (place < rank)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(g.to(operand)), p.to(operand), total, input_precision="tf32x3")
    inside = (row < rows)[:, None] & (place < rank)[None, :]
    places = partial + (split.to(tl.int64) * rows + row)[:, None] * rank + place[None, :]
    total *= scale
    if add:
        total += tl.load(places, mask=inside, other=0.0)
    tl.store(places, total, mask=inside)


def project(x: torch.Tensor, key: Key, rank: int, start: int) -> torch.Tensor:
    """sketching.project for x [tokens, columns]."""
    tokens, columns = x.shape
    projected = torch.empty(tokens, rank, dtype=x.dtype, device=x.device)
    tile_rank = min(_tile_rank(rank), MAX_WIDE_TILE_RANK if x.dtype == torch.float32 else MAX_TILE_RANK)
    if tokens and columns:
        _project_kernel[(triton.cdiv(tokens, TILE_TOKENS), triton.cdiv(rank, tile_rank))](
            x,
            projected,
            tokens,
            columns,
            rank,
            *x.stride(),
            *words(key),
            start,
            operand=_operand(x.dtype),
            tile_tokens=TILE_TOKENS,
            tile_columns=TILE_COLUMNS,
            tile_rank=tile_rank,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        return projected
    return projected.zero_()


def accumulate_(sketch: torch.Tensor, gradient: torch.Tensor, projected: torch.Tensor, scale: float) -> None:
    """sketching.accumulate_ for a contiguous sketch. Where there are few tiles the tokens are split, and the parts
    summed in a fixed order: the same bits every time."""
    tokens, rows = gradient.shape
    rank = projected.shape[1]
    if not tokens:
        return
    tiles = triton.cdiv(rows, TILE_ROWS) * triton.cdiv(rank, _tile_rank(rank))
    splits = max(1, min(MAX_SPLITS, ENOUGH_TILES // tiles, tokens // (8 * TILE_TOKENS)))
    partial = sketch[None] if splits == 1 else torch.empty(splits, rows, rank, device=sketch.device)
    _accumulate(partial, gradient, projected, None, scale, add=splits == 1)
    if splits > 1:
        sketch += partial.sum(0)


def accumulate_groups_(
    sketch: torch.Tensor, gradient: torch.Tensor, projected: torch.Tensor, bounds: torch.Tensor, scale: float
) -> None:
    """sketching.accumulate_groups_ for a contiguous sketch: one launch for all experts."""
    if len(gradient):
        _accumulate(sketch, gradient, projected, bounds, scale, add=True)


def _accumulate(
    partial: torch.Tensor,
    gradient: torch.Tensor,
    projected: torch.Tensor,
    bounds: torch.Tensor | None,
    scale: float,
    *,
    add: bool,
) -> None:
    tokens = len(gradient)
    splits, rows, rank = partial.shape
    tile_rank = _tile_rank(rank)
    _accumulate_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(rank, tile_rank), splits)](
        partial,
        gradient,
        projected.contiguous(),
        bounds,
        tokens,
        rows,
        rank,
        *gradient.stride(),
        triton.cdiv(tokens, splits),
        scale,
        add=add,
        operand=_operand(gradient.dtype),
        tile_tokens=TILE_TOKENS,
        tile_rows=TILE_ROWS,
        tile_rank=tile_rank,
        num_warps=WARPS,
    )


def _tile_rank(rank: int) -> int:
    return min(MAX_TILE_RANK, max(16, triton.next_power_of_2(rank)))


def _operand(dtype: torch.dtype) -> tl.dtype:
    """What products are taken of: what the tensors are of; but Triton's interpreter multiplies bfloat16's patterns as
    if they were whole numbers, and gets float32, which holds the same values."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return tl.bfloat16 if dtype == torch.bfloat16 and not interpreted else tl.float32

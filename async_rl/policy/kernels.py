"""The exact application on a GPU: a Triton kernel that gives the bits of `factors.apply_`; and one for signs alone.

The projection's signs are drawn inside the kernel that applies, and not stored: one Philox call is 128 of them. q is
split into two bytes, q = 256·h + l + 128, and both products run on int8 tensor cores and sum in int32, exact whatever
the hardware's floating-point accumulators do. For weights in bfloat16 the rounding stream is drawn inside as well.

Import this module only where Triton is installed (projection.triton_runs_on asks).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from async_rl.policy.philox import Key

TILE_ROWS = 32
TILE_COLUMNS = 128
TILE_RANK = 32  # the shortest sum that int8 tensor cores take
WARPS = 8  # with fewer, or taller tiles, sums do not fit into the registers, or leave no room for a second tile
DRAWN_ROWS, DRAWN_COLUMNS = 16, 512  # of a tile of signs alone: 64 Philox calls


@triton.jit
def sign_bits(
    key0: tl.tensor,
    key1: tl.tensor,
    first_call: tl.tensor,
    first_row: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tensor:
    """uint32 [rows, columns] of 0 and 1: bits of the projection's rows from first_row on, global columns from
    128 · first_call on. `columns` is a multiple of 128, and both are powers of two."""
    calls: tl.constexpr = columns // 128
    none = tl.zeros([rows, calls], tl.uint32)
    call = none + (first_call + tl.arange(0, calls)).to(tl.uint32)[None, :]
    row = none + (first_row + tl.arange(0, rows)).to(tl.uint32)[:, None]
    a, b, c, d = tl.philox_impl(call, row, none, none, key0, key1)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (rows, calls * 4, 1))  # joined last axes count a, b, c, d
    bits = (words >> tl.arange(0, 32).to(tl.uint32)[None, None, :]) & 1
    return tl.reshape(bits, (rows, columns))


@triton.jit(do_not_specialize=["key0", "key1"])
def _signs_kernel(
    out: tl.tensor,
    rank: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """One tile of the signs of the global columns start … start + count − 1, int8 [rank, count] contiguous. Tiles begin
    at global columns that are multiples of tile_columns, so that each draws whole Philox calls."""
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    first_column = (start // tile_columns + tl.program_id(0)) * tile_columns
    column = first_column - start + tl.arange(0, tile_columns)
    first_call, first_row = first_column // 128, tl.program_id(1) * tile_rows
    bits = sign_bits(key0.to(tl.uint32), key1.to(tl.uint32), first_call, first_row, tile_rows, tile_columns)
    inside = (row < rank)[:, None] & ((column >= 0) & (column < count))[None, :]
    places = out + row.to(tl.int64)[:, None] * count + column[None, :]
    tl.store(places, (2 * bits.to(tl.int32) - 1).to(tl.int8), mask=inside)


@triton.jit
def _shared_noise(
    key0: tl.tensor, key1: tl.tensor, first: tl.tensor, rows: tl.constexpr, columns: tl.constexpr
) -> tl.tensor:
    """uint32 [rows, columns] in 0 … 65535: the rounding stream of `columns` elements from the global element first[row]
    on, which is a multiple of 8: one Philox call for eight elements."""
    calls: tl.constexpr = columns // 8
    call = (first >> 3)[:, None] + tl.arange(0, calls)[None, :]
    low, high = (call & 0xFFFFFFFF).to(tl.uint32), (call >> 32).to(tl.uint32)
    none = tl.zeros([rows, calls], tl.uint32)
    a, b, c, d = tl.philox_impl(low, high, none + 1, none, key0, key1)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (rows, columns))


@triton.jit
def _single_noise(key0: tl.tensor, key1: tl.tensor, element: tl.tensor) -> tl.tensor:
    """The same for elements anywhere, int64 [rows, columns]: a call for each, where rows do not begin at multiples of
    8."""
    call = element >> 3
    lane = (element & 7).to(tl.uint32)
    none = (call & 0).to(tl.uint32)
    a, b, c, d = tl.philox_impl(
        (call & 0xFFFFFFFF).to(tl.uint32), (call >> 32).to(tl.uint32), none + 1, none, key0, key1
    )
    word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
    return (word >> ((lane & 1) * 16)) & 0xFFFF


@triton.jit
def _round_bfloat16(value: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """The pattern, uint16, of float32 `value` rounded with `noise`: see rounding.py."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + noise) >> 16
    rounded = tl.where((rounded & 0x7F80) == 0x7F80, bits >> 16, rounded)
    return tl.where(value != value, 0x7FC0, rounded).to(tl.uint16)


@triton.jit(
    do_not_specialize=["key0", "key1", "noise_key0", "noise_key1", "first_row"],
)
def _apply_kernel(
    weight: tl.tensor,
    q: tl.tensor,
    s: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    rank: tl.tensor,
    weight_expert: tl.tensor,
    weight_row: tl.tensor,
    weight_column: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    noise_key0: tl.tensor,
    noise_key1: tl.tensor,
    start: tl.tensor,
    total: tl.tensor,
    first_row: tl.tensor,
    rounded: tl.constexpr,
    shared_noise: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rank: tl.constexpr,
) -> None:
    """One tile of W [experts, out, columns], of any strides: q [experts, out, rank], s [experts, out] contiguous. Tiles
    begin at global columns that are multiples of tile_columns, so that each draws whole Philox calls."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    first_column = (start // tile_columns + tl.program_id(0)) * tile_columns
    column = first_column - start + tl.arange(0, tile_columns)
    key0, key1 = key0.to(tl.uint32), key1.to(tl.uint32)

    high = tl.zeros([tile_rows, tile_columns], tl.int32)
    low = tl.zeros([tile_rows, tile_columns], tl.int32)
    total_sign = tl.zeros([tile_columns], tl.int32)
    q_row = (expert * out + row) * rank
    for first in range(0, rank, tile_rank):
        bits = sign_bits(key0, key1, first_column // 128, first, tile_rank, tile_columns)
        sign = (2 * bits.to(tl.int32) - 1).to(tl.int8)
        place = first + tl.arange(0, tile_rank)
        factor = tl.load(
            q + q_row[:, None] + place[None, :], mask=(row < out)[:, None] & (place < rank)[None, :], other=0
        ).to(tl.int32)
        high = tl.dot((factor >> 8).to(tl.int8), sign, high, out_dtype=tl.int32)
        low = tl.dot(((factor & 255) - 128).to(tl.int8), sign, low, out_dtype=tl.int32)
        total_sign += tl.sum(sign.to(tl.int32), axis=0)  # of padded ranks too: there q = 0 is 128 more than l = −128
    whole = high * 256 + low + (total_sign * 128)[None, :]

    inside = (row < out)[:, None] & ((column >= 0) & (column < columns))[None, :]
    scale = tl.load(s + expert * out + row, mask=row < out, other=0.0)
    change = whole.to(tl.float32) * scale[:, None]
    places = weight + expert * weight_expert + row.to(tl.int64)[:, None] * weight_row
    places += column.to(tl.int64)[None, :] * weight_column
    if rounded:
        pattern = tl.load(places, mask=inside, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        value = pattern.to(tl.float32, bitcast=True) - change
        first_element = (first_row + expert * out + row) * total.to(tl.int64) + first_column
        noise0, noise1 = noise_key0.to(tl.uint32), noise_key1.to(tl.uint32)
        if shared_noise:
            noise = _shared_noise(noise0, noise1, first_element, tile_rows, tile_columns)
        else:
            noise = _single_noise(noise0, noise1, first_element[:, None] + tl.arange(0, tile_columns)[None, :])
        tl.store(places, _round_bfloat16(value, noise).to(tl.int16, bitcast=True), mask=inside)
    else:
        tl.store(places, tl.load(places, mask=inside, other=0.0) - change, mask=inside)


def apply_(
    weight: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    key: Key,
    *,
    start: int,
    total_columns: int,
    first_row: int,
    rounding: Key | None,
) -> None:
    """factors.apply_, whose checks have been made, for weights [..., out, columns] with at most one leading axis."""
    if not weight.numel():
        return
    weight, q, s = (
        tensor.unsqueeze(0) if tensor.dim() == dims else tensor for tensor, dims in ((weight, 2), (q, 2), (s, 1))
    )
    experts, out, columns = weight.shape
    patterns = weight if rounding is None else weight.view(torch.int16)
    first, last = start // TILE_COLUMNS, -(-(start + columns) // TILE_COLUMNS)
    _apply_kernel[(last - first, triton.cdiv(out, TILE_ROWS), experts)](
        patterns,
        q.contiguous(),
        s.contiguous(),
        out,
        columns,
        q.shape[-1],
        *patterns.stride(),
        *words(key),
        *words(rounding or (0, 0)),
        start,
        total_columns,
        first_row,
        rounded=rounding is not None,
        shared_noise=total_columns % 8 == 0,
        tile_rows=TILE_ROWS,
        tile_columns=TILE_COLUMNS,
        tile_rank=TILE_RANK,
        num_warps=WARPS,
    )


def signs(key: Key, rank: int, start: int, stop: int, device: torch.device | str) -> torch.Tensor:
    """projection.signs, whose checks have been made: in one launch."""
    drawn = torch.empty(rank, stop - start, dtype=torch.int8, device=device)
    if not drawn.numel():
        return drawn
    first, last = start // DRAWN_COLUMNS, -(-stop // DRAWN_COLUMNS)
    _signs_kernel[(last - first, triton.cdiv(rank, DRAWN_ROWS))](
        drawn,
        rank,
        stop - start,
        start,
        *words(key),
        tile_rows=DRAWN_ROWS,
        tile_columns=DRAWN_COLUMNS,
    )
    return drawn


def words(key: Key) -> tuple[int, ...]:
    """A key's words as signed 32-bit numbers of the same bits, so that every key is of one type to the compiler."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in key)

"""The weight change of one layer as integers, and its application: exact by construction.

A proposed change αD·A (D is [out, rank], A = sign/√rank) is sent as q, int16, and one power of two s per output row:
αD ≈ s · q · √rank. Then the change of W is −s·T with T = q · sign, and every partial sum of ±q is an integer below 2²⁴
(rank <= 512): float32 and int32 hold it exactly, in any order of summation. T is formed *whole* and subtracted with one
float32 rounding. So whoever has W and the factors gets the same bits, with any number of threads, any kernel, any way
of splitting rows and columns. Adding the product into W as it is summed (addmm), or rounding it to bfloat16, loses
that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from async_rl.errors import AsyncRLError
from async_rl.policy.projection import MAX_RANK, ProjectionKey, signs, signs_numpy, triton_runs_on
from async_rl.policy.rounding import RoundingKey, noise, noise_numpy, round_bfloat16, round_bfloat16_numpy

LARGEST_Q = 32767
SMALLEST_EXPONENT, LARGEST_EXPONENT = -100, 100  # of s: products with T stay normal numbers of float32
ENCODE_ROWS = 4096
BLOCK_COLUMNS = 4096  # a block's signs, its q and its T lie in a core's cache
BLOCK_ELEMENTS = 1 << 19
ROUNDED_ELEMENTS = 1 << 17  # of a block that is rounded: a stream's many temporaries are small enough to be used again


class Factors(NamedTuple):
    """The change of one layer: W <- W − s · (q @ sign), row by row. Experts are the leading axis."""

    q: torch.Tensor  # int16 [..., out, rank], −32767 … 32767
    s: torch.Tensor  # float32 [..., out], powers of two, 2⁻¹⁰⁰ … 2¹⁰⁰


def encode(displacement: torch.Tensor) -> Factors:
    """The factors of αD, float32 [..., out, rank]: per row s = 2^⌈log2(max|αD| / (√rank · 32767))⌉, at least 2⁻¹⁰⁰,
    and q = round(αD / (√rank · s)), half to even. A row smaller than that is all zero. The owner of some rows encodes
    them once and sends the result. Raises AsyncRLError when a number is not finite or out of range."""
    rank = displacement.shape[-1]
    if displacement.dim() < 2 or not 1 <= rank <= MAX_RANK:
        raise AsyncRLError(
            f"encode: displacement of shape {tuple(displacement.shape)}, must be [..., out, rank <= {MAX_RANK}]"
        )
    rows = displacement.detach().reshape(-1, rank)
    q = torch.empty(rows.shape, dtype=torch.int16, device=rows.device)
    s = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    for begin in range(0, len(rows), ENCODE_ROWS):  # in blocks: the float64 copies stay small
        block = slice(begin, begin + ENCODE_ROWS)
        wanted = rows[block].double() / math.sqrt(rank)
        largest = wanted.abs().amax(dim=1)
        if not bool((largest <= LARGEST_Q * 2.0**LARGEST_EXPONENT).all()):
            raise AsyncRLError("encode: the displacement has a number that is not finite or above 2^100")
        mantissa, exponent = torch.frexp(largest / LARGEST_Q)  # mantissa in [½, 1): at ½ the logarithm is whole
        exponent = (exponent - (mantissa == 0.5).int()).clamp_(min=SMALLEST_EXPONENT)
        scale = power_of_two(torch.where(largest > 0, exponent, SMALLEST_EXPONENT))
        q[block] = (wanted / scale.double()[:, None]).round_().clamp_(-LARGEST_Q, LARGEST_Q).to(torch.int16)
        s[block] = scale
    return Factors(q.reshape(displacement.shape), s.reshape(displacement.shape[:-1]))


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32 2^exponent, of int32 from −126 to 127: by its bits, because torch.ldexp takes a device's pow, which a GPU
    rounds."""
    return ((exponent + 127) << 23).view(torch.float32)


def decode(factors: Factors) -> torch.Tensor:
    """float32 [..., out, rank]: the αD that is really applied, s · q · √rank (rounded to float32)."""
    rank = factors.q.shape[-1]
    return (factors.s[..., None].double() * factors.q.double() * math.sqrt(rank)).float()


def apply_(
    weight: torch.Tensor,
    factors: Factors,
    key: ProjectionKey,
    *,
    start: int = 0,
    total_columns: int | None = None,
    first_row: int = 0,
    rounding: RoundingKey | None = None,
) -> None:
    """W <- W − s · (q @ sign) in place, exactly; on the CPU block by block, so that nothing of the weight's size is
    made.

    `weight`: float32 or bfloat16 [..., out, columns], of any strides: the whole, or the global columns start …
    start + columns − 1 of `total_columns` (default: to the last). bfloat16 takes `rounding`, and then rows are numbered
    through all leading axes from `first_row` on (a shard of rows gives its first). Rows whose q are all zero are not
    touched. Raises AsyncRLError when shapes or dtypes do not fit."""
    columns = weight.shape[-1]
    total = start + columns if total_columns is None else total_columns
    _check(weight, factors, start, total, rounding)
    if triton_runs_on(weight.device) and weight.dim() <= 3:
        from async_rl.policy import kernels

        with torch.no_grad():
            kernels.apply_(
                weight.detach(), *factors, key, start=start, total_columns=total, first_row=first_row, rounding=rounding
            )
        return
    place = _Place(start, total, first_row, rounding)
    with torch.no_grad(), whole_float32():
        for index in np.ndindex(*weight.shape[:-2]):
            matrix = Factors(factors.q[index], factors.s[index])
            _apply_matrix(weight.detach()[index], matrix, key, place)
            place = place._replace(first_row=place.first_row + weight.shape[-2])


class _Place(NamedTuple):
    """Where a matrix lies in the whole weight, and how it is rounded."""

    start: int
    total: int
    first_row: int
    rounding: RoundingKey | None


def _apply_matrix(weight: torch.Tensor, factors: Factors, key: ProjectionKey, place: _Place) -> None:
    out, columns = weight.shape
    rank = factors.q.shape[-1]
    still = (factors.q == 0).all(dim=-1)
    some_still = bool(still.any())
    for left in range(0, columns, BLOCK_COLUMNS):
        right = min(left + BLOCK_COLUMNS, columns)
        sign = signs(key, rank, place.start + left, place.start + right, weight.device).float()
        height = max(1, (BLOCK_ELEMENTS if place.rounding is None else ROUNDED_ELEMENTS) // (right - left))
        buffer = torch.empty(min(height, out), right - left, device=weight.device)
        for top in range(0, out, height):
            rows = slice(top, min(top + height, out))
            change = buffer[: rows.stop - top]
            torch.mm(factors.q[rows].float() * factors.s[rows, None], sign, out=change)  # s · T, every bit of it
            if some_still:  # a sum of nothing but −0 is −0, and −0 − (−0) would turn a weight of −0 into +0
                change.masked_fill_(still[rows, None], 0.0)
            _subtract(weight[rows, left:right], change, place, top, left)


def _subtract(weight: torch.Tensor, change: torch.Tensor, place: _Place, top: int, left: int) -> None:
    if place.rounding is None:
        weight.sub_(change)
        return
    rows = torch.arange(place.first_row + top, place.first_row + top + len(weight), device=weight.device)
    first = rows * place.total + (place.start + left)
    random = noise(place.rounding, first, weight.shape[1])
    weight.copy_(round_bfloat16(weight.float() - change, random))


def apply_numpy(
    weight: np.ndarray[Any, Any],
    q: np.ndarray[Any, Any],
    s: np.ndarray[Any, Any],
    key: ProjectionKey,
    *,
    start: int = 0,
    total_columns: int | None = None,
    first_row: int = 0,
    rounding: RoundingKey | None = None,
) -> None:
    """apply_ for numpy, in integers, in place. `weight`: float32 [..., out, columns], or uint16 with the bit patterns
    of bfloat16 (which takes `rounding`); q int16, s float32. The plainest form: what the others are compared with."""
    columns = weight.shape[-1]
    total = start + columns if total_columns is None else total_columns
    sign = signs_numpy(key, q.shape[-1], start, start + columns).astype(np.int32)
    moves = (q != 0).any(axis=-1)
    change = (q.astype(np.int32) @ sign).astype(np.float32) * s[..., None]
    if weight.dtype == np.float32:
        weight[moves] -= change[moves]
        return
    if rounding is None:
        raise AsyncRLError("apply: a weight in bfloat16 is rounded stochastically and needs a rounding key")
    rows = first_row + np.arange(moves.size, dtype=np.uint64).reshape(moves.shape)
    wide = (weight.astype(np.uint32) << 16).view(np.float32)
    random = noise_numpy(rounding, (rows * total + start).reshape(-1), columns).reshape(weight.shape)
    weight[moves] = round_bfloat16_numpy(wide - change, random)[moves]


def _check(weight: torch.Tensor, factors: Factors, start: int, total: int, rounding: RoundingKey | None) -> None:
    q, s = factors
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise AsyncRLError(f"apply: a weight of {weight.dtype}; float32 and bfloat16 can be kept exact")
    if (weight.dtype == torch.bfloat16) != (rounding is not None):
        raise AsyncRLError(
            f"apply: a weight of {weight.dtype} and rounding {rounding}: bfloat16, and it alone, takes one"
        )
    if q.dtype != torch.int16 or s.dtype != torch.float32 or not 1 <= q.shape[-1] <= MAX_RANK:
        raise AsyncRLError(
            f"apply: q {q.dtype} {tuple(q.shape)}, s {s.dtype}: must be int16 of rank <= {MAX_RANK}, float32"
        )
    if weight.dim() < 2 or q.shape[:-1] != weight.shape[:-1] or s.shape != weight.shape[:-1]:
        raise AsyncRLError(
            f"apply: q {tuple(q.shape)} and s {tuple(s.shape)} do not fit a weight {tuple(weight.shape)}"
        )
    if not 0 <= start <= start + weight.shape[-1] <= total:
        raise AsyncRLError(f"apply: columns {start} … {start + weight.shape[-1]} of {total}")


@contextmanager
def whole_float32() -> Iterator[None]:
    """Products of float32 matrices in float32, whatever else has been asked for (TF32 keeps 11 bits of q's 16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

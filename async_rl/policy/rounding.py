"""Stochastic rounding of float32 to bfloat16, from a stream that everybody can draw.

The 16 bits below a bfloat16 are rounded up with a probability of what they are worth: 16 random bits are added to the
float32's pattern, and the lower half is cut off. So the mean of what is stored is what was meant, and weights kept in
bfloat16 do not lose updates that are smaller than their last bit.

Element e = row · total columns + column takes lane e mod 8 (a word's low half first) of Philox4x32-10 with counter
(⌊e/8⌋ mod 2³², ⌊e/8⌋ >> 32, 1, 0). The 1 keeps it apart from a projection's counters; the key is another one anyway.
Infinities stay; what is not a number becomes 0x7FC0; and a finite number never becomes infinite: where adding would
reach that, the lower half is cut off alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from async_rl.policy.philox import Key, philox4x32, philox4x32_torch
from async_rl.policy.projection import stream_key

RoundingKey = Key
_Wide = np.ndarray[Any, np.dtype[Any]]

LANES = 8  # 16-bit values of one Philox call
STREAM = 1  # the counter's third word
LARGEST = float(np.array(0x7F7F0000, np.uint32).view(np.float32))  # the largest finite bfloat16
NOT_A_NUMBER = 0x7FC0
EXPONENT = 0x7F80


def rounding_key(base_seed: int, update: int, name: str) -> RoundingKey:
    """The key of one layer's rounding stream at one update; `name` as for projection_key."""
    return stream_key(base_seed, update, name, "rounding")


def noise(key: RoundingKey, first: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 [rows, columns] in 0 … 65535: of each row, `columns` elements from the global element first[row] (int64)
    on."""
    call = first // LANES
    calls = 1 + -(-columns // LANES)  # one more: a row may begin within a call
    index = call[:, None] + torch.arange(calls, device=first.device)
    stream = torch.full_like(index, STREAM)
    words = philox4x32_torch(torch.stack([index & 0xFFFFFFFF, index >> 32, stream, stream - STREAM], dim=-1), key)
    lanes = torch.stack([words & 0xFFFF, words >> 16], dim=-1).reshape(len(first), calls * LANES).int()
    begin = first - call * LANES
    if len(first) and bool((begin == begin[0]).all()):
        return lanes[:, int(begin[0]) : int(begin[0]) + columns]
    return lanes.gather(1, begin[:, None] + torch.arange(columns, device=first.device))


def round_bfloat16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """bfloat16, of the shape of `values` (float32), rounded with `random` (int32 in 0 … 65535 of the same shape)."""
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + random) >> 16
    if not bool((values.abs().amax() <= LARGEST) if values.numel() else True):  # also where it is not a number
        rounded = torch.where((rounded & EXPONENT) == EXPONENT, bits >> 16, rounded)
        rounded = torch.where(values.isinf(), bits >> 16, rounded)
        rounded = torch.where(values.isnan(), NOT_A_NUMBER, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def noise_numpy(key: RoundingKey, first: np.ndarray[Any, Any], columns: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """uint32 [rows, columns] in 0 … 65535: the same as `noise`, one call an element."""
    element: _Wide = first.astype(np.uint64)[:, None] + np.arange(columns).astype(np.uint64)
    call = element >> np.uint64(3)
    lane = (element & np.uint64(LANES - 1)).astype(np.uint32)
    counter = np.zeros((*element.shape, 4), np.uint32)
    counter[..., 0] = call & np.uint64(0xFFFFFFFF)
    counter[..., 1] = call >> np.uint64(32)
    counter[..., 2] = STREAM
    words = np.take_along_axis(philox4x32(counter, key), (lane // 2)[..., None].astype(np.int64), axis=-1)[..., 0]
    random: _Wide = (words >> (16 * (lane % 2)).astype(np.uint32)) & np.uint32(0xFFFF)
    return random


def round_bfloat16_numpy(
    values: np.ndarray[Any, Any], random: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bit patterns (uint16) that round_bfloat16 gives."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    cut = bits >> 16
    rounded = (bits + random.astype(np.uint32)) >> 16
    rounded = np.where((rounded & EXPONENT) == EXPONENT, cut, rounded)
    rounded = np.where(np.isinf(values), cut, rounded)
    return np.where(np.isnan(values), NOT_A_NUMBER, rounded).astype(np.uint16)

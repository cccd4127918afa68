"""Philox4x32-10, the counter-based random number generator: the same words from numpy and from torch on any device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the tests have the
known-answer vectors that its authors publish with Random123. There is no state: word = f(counter, key), so anyone
draws any part of a stream, and a shard draws exactly its own.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

Key = tuple[int, int]  # two 32-bit words, the low one first

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by from round to round: golden ratio, square root of 3 less 1

Words = TypeVar("Words", np.ndarray[Any, Any], torch.Tensor)


def _rounds(counter: tuple[Words, Words, Words, Words], key: tuple[Any, Any]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds on 32-bit words that lie in 64-bit integers. In signed ones a product wraps, and the arithmetic shift
    brings copies of its sign down; the mask takes both away, so the upper and lower halves are those of the unsigned
    product."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def philox4x32(counter: np.ndarray[Any, Any], key: Key) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """uint32 [..., 4] from counters uint32 [..., 4] and a key of two 32-bit words."""
    c = counter.astype(np.uint64)
    words = _rounds((c[..., 0], c[..., 1], c[..., 2], c[..., 3]), key)
    return np.stack(words, axis=-1).astype(np.uint32)


def philox4x32_torch(counter: torch.Tensor, key: Key) -> torch.Tensor:
    """The torch twin: int64 [..., 4] holding 32-bit words (0 … 2³² − 1), from counters of the same form, on the
    counters' device."""
    c0, c1, c2, c3 = counter.unbind(-1)
    return torch.stack(_rounds((c0, c1, c2, c3), key), dim=-1)

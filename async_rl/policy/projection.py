"""The projection A of the sketch: ±1/√r, drawn anew for every update, never stored and never sent.

A = sign / √r with r rows and as many columns as the weight has. sign[j, c] is bit c mod 32 (1 is +1, 0 is −1) of word
⌊c/32⌋ of row j; words are Philox4x32-10 with counter (⌊word/4⌋, j, 0, 0), lane word mod 4. The key says which
projection: two processes that agree on (base seed, update, name) agree on every bit, and c is the *global* column, so
the owner of some columns draws those alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch

from async_rl.errors import AsyncRLError
from async_rl.policy.philox import Key, philox4x32, philox4x32_torch

ProjectionKey = Key

MAX_RANK = 512  # with int16 factors every sum of ±q stays below 2²⁴: exact in float32, in any order
LANES = 4  # words of one Philox call
WORD_BITS = 32
CALL_BITS = LANES * WORD_BITS

# The signs of a byte's bits, the lowest first: row b is what byte b unpacks to.
SIGNS_OF_BYTE = (2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1) - 1).astype(np.int8)


def stream_key(*parts: int | str) -> Key:
    """Two 32-bit words, the low one first: BLAKE2b with a digest of 8 bytes, read as a little-endian integer, of the
    parts as a msgpack array."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(list(parts)), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    return number & 0xFFFFFFFF, number >> 32


def projection_key(base_seed: int, update: int, name: str) -> ProjectionKey:
    """The key of one layer's projection at one update. `name` is the checkpoint's module path, without ".weight" and
    without an expert's index: "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.gate_proj"."""
    return stream_key(base_seed, update, name)


def check_range(rank: int, start: int, stop: int) -> None:
    """Raises AsyncRLError unless 1 <= rank <= 512 and 0 <= start <= stop."""
    if not 1 <= rank <= MAX_RANK:
        raise AsyncRLError(f"projection: rank {rank}, must be 1 … {MAX_RANK} (above it sums of factors are not exact)")
    if not 0 <= start <= stop:
        raise AsyncRLError(f"projection: columns {start} … {stop}, must be 0 <= start <= stop")


def signs_numpy(key: ProjectionKey, rank: int, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """int8 [rank, stop − start] of ±1: the signs of the global columns start … stop − 1."""
    check_range(rank, start, stop)
    first, last = start // CALL_BITS, -(-stop // CALL_BITS)
    counter = np.zeros((rank, last - first, LANES), np.uint32)
    counter[..., 0] = np.arange(first, last, dtype=np.uint32)
    counter[..., 1] = np.arange(rank, dtype=np.uint32)[:, None]
    words = philox4x32(counter, key)
    octets = words.astype("<u4").view(np.uint8)
    drawn: np.ndarray[Any, np.dtype[np.int8]] = SIGNS_OF_BYTE[octets].reshape(rank, (last - first) * CALL_BITS)
    return drawn[:, start - first * CALL_BITS : stop - first * CALL_BITS]


def signs(key: ProjectionKey, rank: int, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """torch.int8 [rank, stop − start] of ±1 on `device`: the same bits as signs_numpy, which draws them on a CPU, where
    for a small layer most of the time is what a call costs: a third of torch's. On a GPU Triton draws them, where it
    is installed, in one launch."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.from_numpy(signs_numpy(key, rank, start, stop))
    if triton_runs_on(device):
        from async_rl.policy import kernels

        check_range(rank, start, stop)
        return kernels.signs(key, rank, start, stop, device)
    return signs_torch(key, rank, start, stop, device)


def signs_torch(key: ProjectionKey, rank: int, start: int, stop: int, device: torch.device | str) -> torch.Tensor:
    """`signs` by torch's operators, on any device."""
    check_range(rank, start, stop)
    first, last = start // CALL_BITS, -(-stop // CALL_BITS)
    counter = torch.zeros(rank, last - first, LANES, dtype=torch.int64, device=device)
    counter[..., 0] = torch.arange(first, last, device=device)
    counter[..., 1] = torch.arange(rank, device=device)[:, None]
    words = philox4x32_torch(counter, key)
    octets = ((words[..., None] >> torch.arange(0, WORD_BITS, 8, device=device)) & 0xFF).flatten()
    drawn = _signs_of_byte(torch.device(device)).index_select(0, octets).reshape(rank, (last - first) * CALL_BITS)
    return drawn[:, start - first * CALL_BITS : stop - first * CALL_BITS]


@cache
def _signs_of_byte(device: torch.device) -> torch.Tensor:
    """The table there: copied once, because a copy to a device waits for all that the device has still to do."""
    return torch.from_numpy(SIGNS_OF_BYTE).to(device)


def triton_runs_on(device: torch.device) -> bool:
    """Whether kernels written in Triton can be run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None

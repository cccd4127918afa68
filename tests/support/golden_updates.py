"""Ten updates of one weight, from the house's own generator, and the bits that they end in: whoever applies them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from async_rl.policy.factors import Factors, encode
from async_rl.policy.philox import philox4x32
from async_rl.policy.projection import projection_key
from async_rl.policy.rounding import rounding_key

Key = tuple[int, int]
SENT = "69c6a65f948df520"  # SHA-256, its beginning, of all q and s
ENDS = {torch.float32: "bd496e763583c6f8", torch.bfloat16: "c850630ca3ca5070"}  # of the weight's bytes


def fixed(shape: tuple[int, int], stream: int, unit: float) -> torch.Tensor:
    """Whole multiples of `unit` below 2²³ · unit: no library's generator may change them."""
    counter = np.zeros((shape[0] * shape[1], 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    numbers = (philox4x32(counter, (stream, 0))[:, 0] >> 8).astype(np.int64) - 2**23
    return torch.from_numpy(numbers.reshape(shape).astype(np.float32)) * unit


def bits(weight: torch.Tensor) -> np.ndarray:
    """The patterns of a weight's numbers: −0 is not +0, and one kind of NaN not another."""
    patterns = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
    return weight.cpu().contiguous().view(patterns).numpy().copy()


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def after_ten_updates(
    apply: Callable[[torch.Tensor, Factors, Key, Key | None], None], dtype: torch.dtype, device: str = "cpu"
) -> tuple[str, str]:
    """What was sent, and the weight's digest, when `apply(weight, factors, key, rounding)` has applied all of it."""
    weight = fixed((33, 129), 10, 2.0**-26).to(device, dtype)
    sent = []
    for update in range(10):
        factors = encode(fixed((33, 16), update, 2.0**-33))
        sent += [factors.q.numpy(), factors.s.numpy()]
        rounding = rounding_key(5, update, "layer") if dtype == torch.bfloat16 else None
        apply(weight, Factors(factors.q.to(device), factors.s.to(device)), projection_key(5, update, "layer"), rounding)
    return digest(*sent), digest(bits(weight))

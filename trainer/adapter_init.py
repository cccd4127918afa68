"""What a fresh adapter's A is, the same for every backend: by names and the run's seed alone, so that trainers of any
layout start from one adapter. B is zero, whatever the module.

Linear modules share one stream of random numbers; an expert's tensor has a stream of its own, so that a rank that holds
a few of the experts draws just these.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import msgspec
import torch


def dense_a(in_features: Mapping[str, int], rank: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A of all linear modules that have an adapter, by module path: float64 [rank, in], in order of path. They come out
    of one stream, so who wants one draws all."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(in_features):
        yield name, _uniform((rank, in_features[name]), generator)


def expert_a(name: str, rank: int, in_features: int, seed: int) -> torch.Tensor:
    """A of experts, by the tensor's name in the adapter file: float64 [rank, in]."""
    hashed = hashlib.blake2b(msgspec.msgpack.encode([seed, name]), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little") & (2**63 - 1))
    return _uniform((rank, in_features), generator)


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """In ±1/√in: peft's initialisation."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * (1.0 / math.sqrt(shape[1]))

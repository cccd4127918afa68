"""One decode step from token to token: forward, sampling and log-probability, as one function over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from inference.dense_decoder import DenseShape, DenseWeights, decode_rows
from inference.sampling import processed, sample


class Draw(NamedTuple):
    """How to sample each of n rows: temperature float32[n], 1 where greedy; greedy bool[n], None where no row is;
    uniforms float64[n]."""

    temperature: torch.Tensor
    greedy: torch.Tensor | None
    uniforms: torch.Tensor


def sampled(logits: torch.Tensor, draw: Draw, top: int = 0) -> torch.Tensor:
    """Tokens and their log-probabilities, float64[2, n]: both are exact in it, so that one transfer brings them to the
    host. With `top` = k, [2 + 2k, n]: below them the ids of each row's k likeliest tokens, and then their
    log-probabilities in the distribution that was sampled from."""
    logprobs = processed(logits, draw.temperature)
    out = torch.stack([part.double() for part in sample(logprobs, draw.greedy, draw.uniforms)])
    if not top:
        return out
    values, ids = logprobs.topk(top, dim=1)
    return torch.cat([out, ids.T.double(), values.T.double()])


def decode_step(
    shape: DenseShape,
    weights: DenseWeights,
    rotation: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    ids_n: torch.Tensor,
    positions_n: torch.Tensor,
    seen_l: torch.Tensor,
    draw: Draw,
    top: int = 0,
) -> torch.Tensor:
    """See dense_decoder.decode_rows and `sampled`."""
    return sampled(decode_rows(shape, weights, rotation, keys, values, ids_n, positions_n, seen_l), draw, top)

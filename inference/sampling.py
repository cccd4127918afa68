"""Sampling one token per row, reproducibly: the whole random state of a request is (seed, position).

The t-th new token of a request uses the t-th number of its own Philox stream, whatever else is in the batch and
however often the request was moved, recomputed or handed over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def request_uniforms(seed: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers 0..count-1 of the stream of a 64-bit seed, uniform in [0, 1): float64[count]. A longer stream starts
    with the shorter one, so number t depends only on (seed, t)."""
    return np.random.Generator(np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF)).random(count)


def processed(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled from, float32[n, vocab]: log softmax(logits / temperature),
    of logits [n, vocab] and temperature float32[n]."""
    return torch.log_softmax(logits.float() / temperature[:, None], dim=-1)


def sample(
    logprobs: torch.Tensor, greedy: torch.Tensor | None, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by the inverse of the cumulative distribution.

    logprobs float32[n, vocab] as `processed`; greedy bool[n], None for no row; uniforms float64[n]. Returns tokens
    int64[n] and their log-probabilities float32[n]."""
    # float64: over a vocabulary of 10^5, float32 sums would drift by more than the smallest probabilities.
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    # Scaled by the last sum instead of 1, so that rounding can never lead past the end of the vocabulary.
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logprobs.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

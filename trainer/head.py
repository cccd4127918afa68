"""Log-probabilities of given tokens from the hidden states before the output head, without all the logits at once.

Logits of n tokens are n · vocabulary numbers, and their gradient as many again: more than all the rest of a small model
takes. They are computed here for a chunk of tokens at a time, and what the backward pass needs is all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20  # of logits at a time; at a vocabulary of 150,000 still 100 tokens, enough for fast products


def head_logprobs(
    hidden: torch.Tensor, head: nn.Module, target: torch.Tensor, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> torch.Tensor:
    """log softmax(head(hidden) / temperature)[target]: [n], of `hidden` [n, width] and `target` int64 [n], in float32
    or what is wider. At most `chunk_bytes` of logits exist at once (but at least one token's). Differentiable in
    `hidden` and in the head's weights.

    A frozen linear head is promoted to that dtype, with its input, before they are multiplied (as MiniMax-M1,
    arXiv 2506.13585, found necessary); any other head computes in its own."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    vocabulary = head.weight.shape[0]  # type: ignore[union-attr, index]
    chunk = max(1, chunk_bytes // (int(vocabulary) * dtype.itemsize))
    if type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters()):
        out: torch.Tensor = _FrozenHead.apply(
            hidden, head.weight, head.bias, target, temperature, chunk, hidden.requires_grad and torch.is_grad_enabled()
        )
        return out
    return _in_chunks(hidden, head, target, temperature, chunk)


class _FrozenHead(torch.autograd.Function):
    """Only one number flows back to each token's log-probability, so the forward pass can make its whole derivative in
    `hidden`, (W[target] - Σ_v p_v W_v) / temperature, while it has the token's logits: [n, width] is kept, and nothing
    is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        temperature: float, chunk: int, learns: bool,
    ) -> torch.Tensor:  # fmt: skip
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        out = hidden.new_empty(len(hidden), dtype=dtype)
        slope = hidden.new_empty(hidden.shape if learns else (0, 0), dtype=dtype)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part].to(dtype), weight, bias).div_(temperature)
            wanted = target[part, None]
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            out[part] = (logits.gather(1, wanted) - normaliser)[:, 0]
            if learns:
                rest = logits.sub_(normaliser).exp_().neg_()
                rest.scatter_add_(1, wanted, torch.ones_like(wanted, dtype=dtype))
                slope[part] = _times(rest, weight).div_(temperature)
        ctx.save_for_backward(slope)
        ctx.dtype = hidden.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return ((gradient[:, None] * slope).to(ctx.dtype), *(None,) * 6)


def _blocks(weight: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """Rows of the head's weight to promote at a time: all of them when there is nothing to promote."""
    rows = weight.shape[0] if weight.dtype == dtype else max(1, CHUNK_BYTES // (weight.shape[1] * dtype.itemsize))
    return [slice(start, min(start + rows, weight.shape[0])) for start in range(0, weight.shape[0], rows)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """hidden Wᵀ + b in hidden's dtype: [n, vocabulary]."""
    out = hidden.new_empty(len(hidden), weight.shape[0])
    for block in _blocks(weight, hidden.dtype):
        torch.mm(hidden, weight[block].to(hidden.dtype).T, out=out[:, block])
    return out if bias is None else out.add_(bias)


def _times(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """values W in values' dtype: [n, width]."""
    out = values.new_zeros(len(values), weight.shape[1])
    for block in _blocks(weight, values.dtype):
        out.addmm_(values[:, block], weight[block].to(values.dtype))
    return out


def _in_chunks(
    hidden: torch.Tensor, head: Callable[..., torch.Tensor], target: torch.Tensor, temperature: float, chunk: int
) -> torch.Tensor:
    """A head that trains, or is no plain linear layer: each chunk's logits are computed again in the backward pass."""

    def logprobs(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return selected(head(part[None])[0], wanted, temperature)

    parts = [
        checkpoint(logprobs, part, wanted, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in zip(hidden.split(chunk), target.split(chunk), strict=True)
    ]
    return torch.cat(parts)


def selected(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature)[target]: [n], of logits [n, vocabulary], in float32 or what is wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -nn.functional.cross_entropy(logits / temperature, target, reduction="none")

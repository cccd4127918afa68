"""Log-probabilities of given tokens from the hidden states before the output head, without all the logits at once.

Logits of n tokens are n · vocabulary numbers, and their gradient as many again: more than all the rest of a small model
takes. They are computed here for a chunk of tokens at a time, and what the backward pass needs is all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20  # of logits at a time; at a vocabulary of 150,000 still 100 tokens, enough for fast products


class Mixture(NamedTuple):
    """Some tokens at each of n places, and their weights: ids int64 [n, k], weights floating [n, k] (constants)."""

    ids: torch.Tensor
    weights: torch.Tensor

    def at(self, where: torch.Tensor | slice) -> Mixture:
        """That of some places."""
        return Mixture(self.ids[where], self.weights[where])


def head_logprobs(
    hidden: torch.Tensor, head: nn.Module, target: torch.Tensor, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> torch.Tensor:
    """log softmax(head(hidden) / temperature)[target]: [n], of `hidden` [n, width] and `target` int64 [n], in float32
    or what is wider. At most `chunk_bytes` of logits exist at once (but at least one token's). Differentiable in
    `hidden` and in the head's weights.

    A frozen linear head is promoted to that dtype, with its input, before they are multiplied (as MiniMax-M1,
    arXiv 2506.13585, found necessary); any other head computes in its own."""
    nothing = Mixture(target.new_empty(len(target), 0), hidden.new_empty(len(target), 0))
    return head_logprobs_and_mean(hidden, head, target, nothing, temperature, chunk_bytes)[0]


def head_logprobs_and_mean(
    hidden: torch.Tensor,
    head: nn.Module,
    target: torch.Tensor,
    mixture: Mixture,
    temperature: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`head_logprobs`, and Σ_j w_j log softmax(head(hidden) / temperature)[j] over the mixture's tokens at each place:
    [n] both, differentiable alike, from the same logits. A frozen head also takes the rows of its weight for a chunk's
    mixtures, k · width numbers a token, of which there are at most `chunk_bytes` too."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    vocabulary = int(head.weight.shape[0])  # type: ignore[union-attr, index]
    widest = max(vocabulary, mixture.ids.shape[1] * hidden.shape[1])  # numbers at once for one token
    chunk = max(1, chunk_bytes // (widest * dtype.itemsize))
    if type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters()):
        learns = hidden.requires_grad and torch.is_grad_enabled()
        out: tuple[torch.Tensor, torch.Tensor] = _FrozenHead.apply(
            hidden, head.weight, head.bias, target, *mixture, temperature, chunk, learns
        )
        return out
    return _in_chunks(hidden, head, target, mixture, temperature, chunk)


class _FrozenHead(torch.autograd.Function):
    """Only one number flows back to each token's log-probability, so the forward pass can make its whole derivative in
    `hidden`, (W[target] - Σ_v p_v W_v) / temperature, while it has the token's logits: [n, width] is kept, and nothing
    is computed twice. With a mixture so it is for its sum: Σ_j w_j (W[j] - Σ_v p_v W_v) / temperature, another
    [n, width]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        ids: torch.Tensor, weights: torch.Tensor, temperature: float, chunk: int, learns: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weights = weights.to(dtype)
        mixed = learns and ids.shape[1] > 0
        out, mean = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        slope, mean_slope = (hidden.new_empty(hidden.shape if of else (0, 0), dtype=dtype) for of in (learns, mixed))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = plain_logits(hidden[part].to(dtype), weight, bias).div_(temperature)
            wanted = target[part, None]
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            out[part] = (logits.gather(1, wanted) - normaliser)[:, 0]
            mean[part] = (weights[part] * (logits.gather(1, ids[part]) - normaliser)).sum(1)
            if learns:
                rest = logits.sub_(normaliser).exp_().neg_()
                rest.scatter_add_(1, wanted, torch.ones_like(wanted, dtype=dtype))
                slope[part] = times_weight(rest, weight).div_(temperature)
            if mixed:  # Σ_j w_j (W[j] - W[target]) and (Σ_j w_j) times the slope of the target
                moved = weight[ids[part]].to(dtype) - weight[wanted].to(dtype)
                mean_slope[part] = torch.bmm(weights[part, None], moved)[:, 0].div_(temperature)
                mean_slope[part] += weights[part].sum(1, keepdim=True) * slope[part]
        ctx.save_for_backward(slope, mean_slope)
        ctx.dtype = hidden.dtype
        return out, mean

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor, of_mean: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        slope, mean_slope = ctx.saved_tensors
        total = gradient[:, None] * slope
        if len(mean_slope):
            total += of_mean[:, None] * mean_slope
        return (total.to(ctx.dtype), *(None,) * 8)


def _blocks(weight: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """Rows of the head's weight to promote at a time: all of them when there is nothing to promote."""
    rows = weight.shape[0] if weight.dtype == dtype else max(1, CHUNK_BYTES // (weight.shape[1] * dtype.itemsize))
    return [slice(start, min(start + rows, weight.shape[0])) for start in range(0, weight.shape[0], rows)]


def plain_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """hidden Wᵀ + b in hidden's dtype: [n, vocabulary]."""
    out = hidden.new_empty(len(hidden), weight.shape[0])
    for block in _blocks(weight, hidden.dtype):
        torch.mm(hidden, weight[block].to(hidden.dtype).T, out=out[:, block])
    return out if bias is None else out.add_(bias)


def times_weight(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """values W in values' dtype: [n, width]."""
    out = values.new_zeros(len(values), weight.shape[1])
    for block in _blocks(weight, values.dtype):
        out.addmm_(values[:, block], weight[block].to(values.dtype))
    return out


def _in_chunks(
    hidden: torch.Tensor,
    head: Callable[..., torch.Tensor],
    target: torch.Tensor,
    mixture: Mixture,
    temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A head that trains, or is no plain linear layer: each chunk's logits are computed again in the backward pass."""

    def both(part: torch.Tensor, wanted: torch.Tensor, *mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(part[None])[0]
        return selected(logits, wanted, temperature), mean_of(logits, Mixture(*mixed), temperature)

    parts = [
        checkpoint(both, *arguments, use_reentrant=False, preserve_rng_state=False)
        for arguments in zip(*(values.split(chunk) for values in (hidden, target, *mixture)), strict=True)
    ]
    out, mean = (torch.cat(values) for values in zip(*parts, strict=True))
    return out, mean


def selected(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature)[target]: [n], of logits [n, vocabulary], in float32 or what is wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -nn.functional.cross_entropy(logits / temperature, target, reduction="none")


def mean_of(logits: torch.Tensor, mixture: Mixture, temperature: float) -> torch.Tensor:
    """Σ_j w_j log softmax(logits / temperature)[j] over the mixture's tokens: [n], in dtypes as `selected`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if not mixture.ids.shape[1]:
        return logits.new_zeros(len(logits), dtype=dtype)
    logits = logits.to(dtype) / temperature
    logprobs = logits.gather(1, mixture.ids) - torch.logsumexp(logits, dim=1, keepdim=True)
    return (mixture.weights.to(logits.dtype) * logprobs).sum(1)

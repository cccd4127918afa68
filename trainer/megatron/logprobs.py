"""Log-probabilities from a head whose rows lie on several ranks, without gathering logits: what crosses is one maximum,
one sum and one logit for each token.

As in trainer/head.py logits exist for a chunk of tokens at a time, and the forward pass makes the derivative in the
hidden states while it has them. Everything is computed on copies: megatron-core's own cross entropy writes into the
logits that it is given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainer.head import CHUNK_BYTES, plain_logits, times_weight


def vocabulary_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    *,
    first: int,
    group: Any,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """log softmax(hidden Wᵀ / temperature)[target] over all ranks' rows of W: [n] in float32 or what is wider, the same
    on each rank, of `hidden` [n, width] and `target` int64 [n] (the same on each), at most `chunk_bytes` of logits at
    once. `weight` [rows, width] are the rank's rows, of the vocabulary from `first` on; without those that pad it.

    Differentiable in `hidden` alone, and the gradient on a rank is the part of it that its rows make: the sum over
    `group` is the whole."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    chunk = max(1, chunk_bytes // (max(1, len(weight)) * dtype.itemsize))
    learns = hidden.requires_grad and torch.is_grad_enabled()
    out: torch.Tensor = _ShardedHead.apply(hidden, weight, target, temperature, first, group, chunk, learns)
    return out


class _ShardedHead(torch.autograd.Function):
    """The derivative of a token's log-probability in its hidden state is (W[target] - Σ_v p_v W_v) / temperature; a
    rank keeps its rows' share of that, [n, width]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, first: int,
        group: Any, chunk: int, learns: bool,
    ) -> torch.Tensor:  # fmt: skip
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        out = hidden.new_empty(len(hidden), dtype=dtype)
        slope = hidden.new_empty(hidden.shape if learns else (0, 0), dtype=dtype)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = plain_logits(hidden[part].to(dtype), weight, None).div_(temperature)
            mine = (target[part] >= first) & (target[part] < first + len(weight))
            wanted = (target[part] - first).masked_fill(~mine, 0)[:, None]
            normaliser = _normaliser(logits, group)
            chosen = logits.gather(1, wanted)[:, 0].masked_fill(~mine, 0) if len(weight) else logits.sum(1)
            dist.all_reduce(chosen, group=group)
            out[part] = chosen - normaliser
            if learns:
                rest = logits.sub_(normaliser[:, None]).exp_().neg_()
                if len(weight):
                    rest.scatter_add_(1, wanted, mine[:, None].to(dtype))
                slope[part] = times_weight(rest, weight).div_(temperature)
        ctx.save_for_backward(slope)
        ctx.dtype = hidden.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return ((gradient[:, None] * slope).to(ctx.dtype), *(None,) * 7)


def _normaliser(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """log Σ exp over all ranks' columns: [n]."""
    own = torch.logsumexp(logits, dim=1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    highest = own.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    total = (own - highest).exp()
    dist.all_reduce(total, group=group)
    return highest + total.log()

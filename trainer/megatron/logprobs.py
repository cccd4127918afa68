"""Log-probabilities from a head whose rows lie on several ranks, without gathering logits: what crosses is one maximum,
one sum and one logit for each token.

As in trainer/head.py logits exist for a chunk of tokens at a time, and the forward pass makes the derivative in the
hidden states while it has them. Everything is computed on copies: megatron-core's own cross entropy writes into the
logits that it is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer.head import CHUNK_BYTES, Mixture, plain_logits, times_weight


class HeadShard(NamedTuple):
    """A rank's rows of the head, those of the vocabulary from `first` on: `weight` [rows, width], at least one and
    none that pads the vocabulary; the `group` of the ranks that have the rest; and `room`, the rows that the rank with
    most of them has: the same number on each."""

    weight: torch.Tensor
    first: int
    group: Any
    room: int

    def local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of these tokens have their row here (bool), and where (0 for the others)."""
        here = (ids >= self.first) & (ids < self.first + len(self.weight))
        return here, (ids - self.first).masked_fill(~here, 0)


def vocabulary_logprobs(
    hidden: torch.Tensor,
    head: HeadShard,
    target: torch.Tensor,
    temperature: float,
    mixture: Mixture | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """log softmax(hidden Wᵀ / temperature)[target] over all ranks' rows of W: [1, n] in float32 or what is wider, the
    same on each rank, of `hidden` [n, width] and `target` int64 [n] (the same on each), at most `chunk_bytes` of logits
    at once. With a `mixture` [2, n], the second row Σ_j w_j log softmax(…)[j] over its tokens at each place.

    Differentiable in `hidden` alone, and the gradient on a rank is the part of it that its rows make: the sum over the
    group is the whole."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if mixture is None:
        mixture = Mixture(target.new_empty(len(target), 0), hidden.new_empty(len(target), 0))
        rows = 1
    else:
        rows = 2
    # Numbers at once for one token. All ranks have to cut alike: each chunk is a few collectives.
    widest = max(head.room, mixture.ids.shape[1] * hidden.shape[1])
    chunk = max(1, chunk_bytes // (widest * dtype.itemsize))
    learns = hidden.requires_grad and torch.is_grad_enabled()
    out: torch.Tensor = _ShardedHead.apply(hidden, head, target, mixture, temperature, chunk, learns)
    return out[:rows]


class _ShardedHead(torch.autograd.Function):
    """The derivative of a token's log-probability in its hidden state is (W[target] - Σ_v p_v W_v) / temperature; a
    rank keeps its rows' share of that, [n, width]. That of a mixture is Σ_j w_j (W[j] - Σ_v p_v W_v) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: HeadShard, target: torch.Tensor, mixture: Mixture, temperature: float,
        chunk: int, learns: bool,
    ) -> torch.Tensor:  # fmt: skip
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        mixture = Mixture(mixture.ids, mixture.weights.to(dtype))
        mixed = mixture.ids.shape[1] > 0
        out = hidden.new_empty(2, len(hidden), dtype=dtype)
        slopes = [hidden.new_empty(hidden.shape if of else (0, 0), dtype=dtype) for of in (learns, learns and mixed)]
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = plain_logits(hidden[part].to(dtype), head.weight, None).div_(temperature)
            normaliser = _normaliser(logits, head.group)
            some = mixture.at(part)
            out[:, part] = _chosen(logits, head, target[part], some)
            out[0, part] -= normaliser
            out[1, part] -= some.weights.sum(1) * normaliser
            if learns:
                here, where = head.local(target[part, None])
                rest = logits.sub_(normaliser[:, None]).exp_().neg_()
                rest.scatter_add_(1, where, here.to(dtype))
                slopes[0][part] = times_weight(rest, head.weight).div_(temperature)
            if learns and mixed:  # Σ_j w_j (W[j] - W[target]) and (Σ_j w_j) times the slope of the target
                total = some.weights.sum(1, keepdim=True)
                moved = _rows(head, some) - total * _rows(head, Mixture(target[part, None], torch.ones_like(total)))
                slopes[1][part] = moved.div_(temperature) + total * slopes[0][part]
        ctx.save_for_backward(*slopes)
        ctx.dtype = hidden.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        slope, mean_slope = ctx.saved_tensors
        total = gradient[0, :, None] * slope
        if len(mean_slope):
            total += gradient[1, :, None] * mean_slope
        return (total.to(ctx.dtype), *(None,) * 6)


def _chosen(logits: torch.Tensor, head: HeadShard, target: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """The logits of the targets, and the weighted sums of those of the mixtures' tokens: [2, n], of all ranks."""
    here, where = head.local(target[:, None])
    wanted = logits.gather(1, where).masked_fill(~here, 0)[:, 0]
    here, where = head.local(mixture.ids)
    mean = (mixture.weights * logits.gather(1, where).masked_fill(~here, 0)).sum(1)
    both = torch.stack([wanted, mean])
    dist.all_reduce(both, group=head.group)
    return both


def _rows(head: HeadShard, mixture: Mixture) -> torch.Tensor:
    """Σ_j w_j W[j] over the tokens whose rows lie here: [n, width]."""
    here, where = head.local(mixture.ids)
    weights = mixture.weights.masked_fill(~here, 0)
    return torch.bmm(weights[:, None], head.weight[where].to(weights.dtype))[:, 0]


def _normaliser(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """log Σ exp over all ranks' columns: [n]."""
    own = torch.logsumexp(logits, dim=1)
    highest = own.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    total = (own - highest).exp()
    dist.all_reduce(total, group=group)
    return highest + total.log()

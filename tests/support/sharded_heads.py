"""What the test of the head on several ranks runs: log-probabilities by one rank's function from each rank's rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainer.head import Mixture
from trainer.megatron.logprobs import HeadShard, vocabulary_logprobs


def compute(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (hidden, weight, target, ids, weights, slopes [rows, n], temperature, chunk_bytes): the values, the
    gradient in `hidden` summed over the ranks, and whether hidden and weight are what they were. There is a mixture if
    there are slopes of two rows."""
    return [_case(**case) for case in payload]


def _case(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    slopes: torch.Tensor, temperature: float, chunk_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    size = -(-len(weight) // dist.get_world_size())
    first = size * dist.get_rank()
    leaf = hidden.clone().requires_grad_()
    shard = HeadShard(weight[first : first + size].clone(), first, dist.group.WORLD, size)
    mixture = Mixture(ids, weights) if len(slopes) == 2 else None
    out = vocabulary_logprobs(leaf, shard, target, temperature, mixture, chunk_bytes)
    (out * slopes).sum().backward()
    assert leaf.grad is not None
    gradient = leaf.grad.clone()
    dist.all_reduce(gradient)
    kept = torch.equal(leaf.detach(), hidden) and torch.equal(shard.weight, weight[first : first + size])
    return {"values": out.detach(), "gradient": gradient, "kept": kept}

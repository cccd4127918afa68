"""What the test of passes through the pipeline runs on its ranks: odd micro-batches, and models that learn in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from sharded_models import CPU, TEMPERATURE, rows_of, sequences

from async_rl.parallel_config import ParallelConfig
from trainer.logprobs import Rows


def compute(payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (path, parallel, which micro-batches each data rank has, layers that learn): on each rank the
    gradients of its own parameters by name, of the sum of the log-probabilities."""
    return [_case(**case) for case in payload]


def _case(path: str, parallel: dict[str, Any], of_rank: list[list[int | None]], layers: list[int]) -> dict[str, Any]:
    from trainer.megatron import groups, model, passes

    sizes = ParallelConfig(**parallel)
    groups.begin(sizes, CPU)
    try:
        sharded = model.build(path, sizes, dtype=torch.float32, device=CPU, recompute=True)
        for number, layer in sharded.named_layers():
            layer.requires_grad_(number in layers)
        mine = of_rank[sharded.groups.dp.rank()]
        called: list[int] = []

        def loss_of(index: int, logprobs: torch.Tensor) -> torch.Tensor | None:
            called.append(index)
            return None if mine[index] is None else logprobs.sum()

        passes.run(sharded, [_rows(which) for which in mine], loss_of, temperature=TEMPERATURE, learns=True)
        assert called == (list(range(len(mine))) if sharded.stage.last else [])
        gradients = {}
        for number, layer in sharded.named_layers():
            found = layer.self_attention.linear_proj.weight.grad
            if found is not None:
                dist.all_reduce(found, group=sharded.groups.dp)
                gradients[f"model.layers.{number}.self_attn.o_proj.weight"] = found.clone()
        return gradients
    finally:
        groups.end()


def _rows(which: int | None) -> Rows:
    """A micro-batch of `sequences`; None: one of which no token is wanted."""
    if which is not None:
        return rows_of(sequences()[which])
    rows = rows_of(sequences()[1])
    return rows._replace(position=rows.position[:0], target=rows.target[:0])


def of_one_process(path: str, micro_batches: Sequence[int]) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for which in micro_batches:
        for tokens in sequences()[which]:
            ids = torch.from_numpy(tokens).long()[None]
            logprobs = torch.log_softmax(model(ids).logits[0, :-1] / TEMPERATURE, dim=-1)
            logprobs.gather(1, ids[0, 1:, None]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

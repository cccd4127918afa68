"""What the tests of sketches under Megatron run on their ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lora_ranks import SEED, weighted
from sharded_models import CPU, TEMPERATURE, rows_of, sequences

from async_rl.parallel_config import ParallelConfig
from async_rl.policy.factors import Factors


def sketch(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case (path, parallel, recompute, modules, factors): on every rank its parts of the sketches, with their
    places, and the norm; on rank 0 the weights after `factors` (q and s by module) were applied."""
    return [_sketch(**case) for case in payload["cases"]]


def _sketch(
    path: str, parallel: dict[str, Any], recompute: bool, modules: list[tuple[str, int, int]], factors: dict[str, Any]
) -> dict[str, Any]:
    from trainer.megatron import groups, hf_weights, model, passes
    from trainer.megatron.layout import stage_layers
    from trainer.megatron.sketching import ShardedSketches
    from trainer.megatron.slices import Plan
    from trainer.targets import Target

    sizes = ParallelConfig(**parallel)
    groups.begin(sizes, CPU)
    try:
        sharded = model.build(path, sizes, dtype=torch.float32, device=CPU, recompute=recompute)
        layers = sharded.config.num_hidden_layers
        stages = tuple(tuple(stage_layers(layers, sizes.pipeline, stage)) for stage in range(sizes.pipeline))
        some = next(iter(factors.values()))[0].shape[1]
        targets = tuple(Target(*each) for each in modules)
        plan = Plan(targets, some, False, sizes, stages, getattr(sharded.config, "num_experts", 0))
        sketches = ShardedSketches(sharded, plan, dist.get_rank(), SEED)
        pg = sharded.groups
        mine = list(range(len(sequences())))[pg.dp.rank() :: pg.dp.size()]
        batches = [rows_of(sequences()[index]) for index in mine]
        passes.run(
            sharded,
            batches,
            lambda index, logprobs: weighted(mine[index], logprobs),
            temperature=TEMPERATURE,
            learns=True,
        )
        sketches.reduce()
        parts = {(name, *block.piece.rows): block.sketch.numpy().copy() for name, block in sketches.blocks.items()}
        owned = {name for name, block in sketches.blocks.items() if block.piece.owns}
        norm = sketches.norm()
        sketches.apply({name: Factors(*map(torch.from_numpy, each)) for name, each in factors.items()})
        weights = {name: value.numpy().copy() for name, value in hf_weights.full_tensors(sharded) if value is not None}
        return {"parts": parts, "owned": owned, "norm": norm, "weights": weights}
    finally:
        groups.end()

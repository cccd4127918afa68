"""Plans of adapters on ranks for tests that need no ranks."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from async_rl.parallel_config import ParallelConfig, check_parallel
from async_rl.schema import ConfigError
from trainer.megatron.slices import Plan
from trainer.targets import Target

HIDDEN, QUERIES, KEYS, FFN, EXPERT_FFN, LAYERS, EXPERTS, RANK = 32, 64, 32, 48, 16, 4, 8, 3


def modules(moe: bool) -> tuple[Target, ...]:
    """Of a model of four layers; of a mixture-of-experts one, the first is dense."""
    found = []
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, out, into in (
            ("q", QUERIES, HIDDEN), ("k", KEYS, HIDDEN), ("v", KEYS, HIDDEN), ("o", HIDDEN, QUERIES),
        ):  # fmt: skip
            found.append(Target(f"{at}.self_attn.{name}_proj", out, into))
        dense = not moe or layer == 0
        for expert in [""] if dense else [f"experts.{each}." for each in range(EXPERTS)]:
            wide = FFN if dense else EXPERT_FFN
            found += [Target(f"{at}.mlp.{expert}{name}_proj", wide, HIDDEN) for name in ("gate", "up")]
            found.append(Target(f"{at}.mlp.{expert}down_proj", HIDDEN, wide))
    return tuple(sorted(found))


def plan_of(parallel: ParallelConfig, *, moe: bool = True, shared_outer: bool = False) -> Plan:
    size = LAYERS // parallel.pipeline
    stages = tuple(tuple(range(first, first + size)) for first in range(0, LAYERS, size))
    return Plan(modules(moe), RANK, shared_outer, parallel, stages, EXPERTS if moe else 0)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelConfig:
    sizes = {name: draw(st.sampled_from((1, 2, 4))) for name in ("tensor", "pipeline", "data")}
    inner = {name: draw(st.sampled_from((1, 2, 4))) for name in ("expert", "expert_tensor")}
    parallel = ParallelConfig(**sizes, **inner, sequence=sizes["tensor"] > 1 and draw(st.booleans()))
    try:
        check_parallel(parallel)
    except ConfigError:
        return msgspec.structs.replace(parallel, expert=1, expert_tensor=1)
    return parallel

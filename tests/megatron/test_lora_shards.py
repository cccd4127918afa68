"""What the ranks of one layout write, those of any other read; the files alone, so without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_plans import layouts, plan_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from trainer.megatron.saved import read_state, read_whole, write_shard
from trainer.megatron.slices import Owners, Plan, pieces, place_of, whole
from trainer.optimizer_state import Counters

CONFIG = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
FEW = layouts().filter(lambda parallel: parallel.ranks <= 8)


def write(folder: Path, plan: Plan, ranks: list[int] | None = None) -> dict[str, torch.Tensor]:
    """A checkpoint as `plan`'s ranks make it, of a step of AdamW; the values. `ranks`: those that come to write."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in whole(plan).items()}
    owners = Owners(plan)
    writing = [rank for rank in range(plan.parallel.ranks) if owners.of(rank)]
    for rank in writing if ranks is None else ranks:
        own = owners.of(rank)
        parameters = {piece.name: torch.nn.Parameter(tensors[piece.name][piece.index].clone()) for piece in own}
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=0.0)
        for parameter in parameters.values():
            parameter.grad = parameter.detach() * 10
        optimizer.step()
        write_shard(folder, rank, writing, own, parameters, optimizer, CONFIG)
    return tensors


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FEW, FEW, st.booleans())
def test_any_layout_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, before: ParallelConfig, after: ParallelConfig, shared: bool
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors = write(folder, plan_of(before, shared_outer=shared))
    plan = plan_of(after, shared_outer=shared)
    for rank in range(after.ranks):
        held = {piece.name: piece for piece in pieces(plan, place_of(rank, after)).values()}
        state = read_state(folder, held.values(), whole(plan), CONFIG)
        assert state.values.keys() == state.moments.keys() == held.keys()
        for name, piece in held.items():
            assert torch.equal(state.values[name], tensors[name][piece.index])
            moments = state.moments[name]
            assert torch.allclose(moments["exp_avg"], tensors[name][piece.index])
            assert torch.allclose(moments["exp_avg_sq"], tensors[name][piece.index].square() * 0.1, atol=1e-6)
            assert float(moments["step"]) == 1


def test_parts_that_are_written_twice_or_not_at_all_are_refused(tmp_path: Path) -> None:
    plan = plan_of(ParallelConfig(tensor=2, sequence=True))
    write(tmp_path, plan)
    shard = tmp_path / "shard-00001.safetensors"
    (tmp_path / "shard-00000.safetensors").replace(shard)
    write(tmp_path, plan, [0])
    with pytest.raises(AsyncRLError, match="do not make up the whole tensor"):
        read_state(tmp_path, [], whole(plan), CONFIG)
    shard.unlink()
    with pytest.raises(AsyncRLError, match=r"shard-00001\.safetensors is missing"):
        read_state(tmp_path, [], whole(plan), CONFIG)


def test_another_policy_than_the_counters_name_is_not_exported(tmp_path: Path) -> None:
    write(tmp_path, plan_of(ParallelConfig(pipeline=2)))
    with pytest.raises(AsyncRLError, match="its shards together are not the policy abababab"):
        read_whole(tmp_path, Counters(1, "ab" * 32, ""))

"""What the ranks of one layout write, those of any other read; the files alone, so without ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from adapter_plans import layouts, plan_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.policy.adapter import policy_digest
from trainer.megatron.saved import read_for_one_process, read_state, read_whole, write_shard
from trainer.megatron.slices import Owners, Plan, pieces, place_of, whole
from trainer.optimizer_state import Counters

CONFIG = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
FEW = layouts().filter(lambda parallel: parallel.ranks <= 8)


def write(
    folder: Path, plan: Plan, ranks: list[int] | None = None, seed: int = 0, steps: int = 1
) -> tuple[dict[str, torch.Tensor], Counters]:
    """A checkpoint as `plan`'s ranks make it, of AdamW after a step or more that moved nothing; the values, and what
    backend.json would say. `ranks`: those that come to write."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in whole(plan).items()}
    counters = Counters(steps, policy_digest(tensors, CONFIG), "")
    owners = Owners(plan)
    writing = [rank for rank in range(plan.parallel.ranks) if owners.of(rank)]
    for rank in writing if ranks is None else ranks:
        own = owners.of(rank)
        parameters = {piece.name: torch.nn.Parameter(tensors[piece.name][piece.index].clone()) for piece in own}
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=0.0)
        for parameter in parameters.values():
            parameter.grad = parameter.detach() * 10
        for _ in range(steps):
            optimizer.step()
        write_shard(folder, counters, rank, writing, own, parameters, optimizer, CONFIG)
    return tensors, counters


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FEW, FEW, st.booleans())
def test_any_layout_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, before: ParallelConfig, after: ParallelConfig, shared: bool
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors, counters = write(folder, plan_of(before, shared_outer=shared))
    plan = plan_of(after, shared_outer=shared)
    for rank in range(after.ranks):
        held = {piece.name: piece for piece in pieces(plan, place_of(rank, after)).values()}
        state = read_state(folder, counters, held.values(), whole(plan), CONFIG)
        assert state.values.keys() == state.moments.keys() == held.keys()
        for name, piece in held.items():
            assert torch.equal(state.values[name], tensors[name][piece.index])
            moments = state.moments[name]
            assert torch.allclose(moments["exp_avg"], tensors[name][piece.index])
            assert torch.allclose(moments["exp_avg_sq"], tensors[name][piece.index].square() * 0.1, atol=1e-6)
            assert float(moments["step"]) == 1


def test_parts_that_are_written_twice_or_not_at_all_are_refused(tmp_path: Path) -> None:
    plan = plan_of(ParallelConfig(tensor=2, sequence=True))
    _, counters = write(tmp_path, plan)
    shard = tmp_path / "shard-00001.safetensors"
    (tmp_path / "shard-00000.safetensors").replace(shard)
    write(tmp_path, plan, [0])
    with pytest.raises(AsyncRLError, match="do not make up the whole tensor"):
        read_state(tmp_path, counters, [], whole(plan), CONFIG)
    shard.unlink()
    with pytest.raises(AsyncRLError, match=r"shard-00001\.safetensors is missing"):
        read_state(tmp_path, counters, [], whole(plan), CONFIG)


def parameters_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("seed", "steps"), [(0, 2), (7, 1), (7, 2)])
def test_files_of_two_checkpoints_are_not_read_as_one(tmp_path: Path, seed: int, steps: int) -> None:
    """Of the same adapter and layout, of other values or other steps; nor those of one with the other's counters."""
    plan = plan_of(ParallelConfig(pipeline=2))
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    tensors, counters = write(first, plan)
    _, others = write(second, plan, seed=seed, steps=steps)
    read_state(first, counters, [], whole(plan), CONFIG)
    read_for_one_process(second, others, parameters_of(tensors), CONFIG)
    with pytest.raises(AsyncRLError, match=r"shard-00000.* after 1 steps, backend.json .*: files of two checkpoints"):
        read_state(first, others, [], whole(plan), CONFIG)
    shutil.copy2(second / "shard-00001.safetensors", first)
    with pytest.raises(AsyncRLError, match=rf"shard-00001.* after {steps} steps, backend.json .*: files of two"):
        read_state(first, counters, [], whole(plan), CONFIG)


def test_another_policy_than_the_counters_name_is_not_loaded_nor_exported(tmp_path: Path) -> None:
    """Values that are not those of the digest, which every file names."""
    plan = plan_of(ParallelConfig(pipeline=2))
    tensors, counters = write(tmp_path, plan)
    path = tmp_path / "shard-00000.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    found = load_file(path)
    next(tensor for key, tensor in found.items() if key.startswith("value/")).add_(1)
    save_file(found, path, metadata=metadata)
    with pytest.raises(AsyncRLError, match="its shards together are not the policy"):
        read_whole(tmp_path, counters)
    with pytest.raises(AsyncRLError, match="its shards together are not the policy"):
        read_for_one_process(tmp_path, counters, parameters_of(tensors), CONFIG)

"""How adapters lie on ranks: pure, so many layouts."""

from __future__ import annotations

import numpy as np
import pytest
from adapter_plans import layouts, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.parallel_config import ParallelConfig
from trainer.megatron.slices import Owners, SliceError, check_plan, pieces, place_of, tensor_name, whole
from trainer.targets import Target


@settings(max_examples=60)
@given(layouts(), st.booleans(), st.booleans())
def test_every_element_of_every_tensor_has_one_owner(parallel: ParallelConfig, moe: bool, shared: bool) -> None:
    plan = plan_of(parallel, moe=moe, shared_outer=shared)
    owners = Owners(plan)
    counts = {name: np.zeros(shape, int) for name, shape in whole(plan).items()}
    for rank in range(parallel.ranks):
        for piece in owners.of(rank):
            assert piece.shape == counts[piece.name].shape
            counts[piece.name][piece.index] += 1
    assert all((count == 1).all() for count in counts.values())


@settings(max_examples=60)
@given(layouts(), st.booleans())
def test_ranks_that_sum_a_gradient_hold_the_same_part_and_one_of_them_owns_it(
    parallel: ParallelConfig, shared: bool
) -> None:
    plan = plan_of(parallel, shared_outer=shared)
    places = [place_of(rank, parallel) for rank in range(parallel.ranks)]
    held = [{piece.name: piece for piece in pieces(plan, place).values()} for place in places]
    for place, mine in zip(places, held, strict=True):
        for name, piece in mine.items():
            group = {
                theirs[name]
                for other, theirs in zip(places, held, strict=True)
                if name in theirs and theirs[name][1:4] == piece[1:4]
                and other.pipeline == place.pipeline
            }  # fmt: skip
            assert len({each.sums for each in group}) == 1
            assert sum(each.owns for each in group) == 1


@given(layouts())
def test_a_rank_has_one_place_among_all_and_one_among_the_experts(parallel: ParallelConfig) -> None:
    places = [place_of(rank, parallel) for rank in range(parallel.ranks)]
    assert len({(place.pipeline, place.tensor, place.data) for place in places}) == parallel.ranks
    assert len({(place.pipeline, *place[3:]) for place in places}) == parallel.ranks


def test_what_experts_share_is_named_without_their_number() -> None:
    module = "model.layers.1.mlp.experts.3.gate_proj"
    expected = "base_model.model.model.layers.1.mlp.experts.gate_proj.lora_A.weight"
    assert tensor_name(module, "A", shared=True) == expected
    names = whole(plan_of(ParallelConfig(), shared_outer=True))
    assert tensor_name(module, "A", shared=True) in names
    assert tensor_name(module, "B") in names
    assert tensor_name(module, "A") not in names
    down = "model.layers.1.mlp.experts.3.down_proj"
    assert tensor_name(down, "A") in names
    assert tensor_name(down, "B", shared=True) in names


def test_the_names_of_the_file_do_not_depend_on_the_layout() -> None:
    spread = ParallelConfig(tensor=2, pipeline=2, data=2, expert=4, sequence=True)
    assert whole(plan_of(spread)) == whole(plan_of(ParallelConfig()))


def test_a_stage_where_nothing_learns_is_refused() -> None:
    plan = plan_of(ParallelConfig(pipeline=2))
    only = tuple(each for each in plan.modules if each.name.startswith("model.layers.0."))
    check_plan(plan)
    with pytest.raises(SliceError, match="layers 2 to 3, pipeline stage 1, where then nothing learns"):
        check_plan(plan._replace(modules=only))


def test_features_that_cannot_be_shared_evenly_are_refused() -> None:
    plan = plan_of(ParallelConfig(tensor=64))
    with pytest.raises(SliceError, match=r"down_proj: 48 features .* by 64 tensor ranks"):
        pieces(plan, place_of(0, plan.parallel))


def test_a_router_is_refused_by_name() -> None:
    plan = plan_of(ParallelConfig())._replace(modules=(Target("model.layers.1.mlp.gate", 8, 32),))
    with pytest.raises(SliceError, match=r"model\.layers\.1\.mlp\.gate cannot be adapted by backend megatron"):
        check_plan(plan)

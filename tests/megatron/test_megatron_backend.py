"""The Megatron backend is the torch backend: the same calls give the same numbers and files, over any ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from backend_ranks import life, live, make, same
from rank_pool import run_ranks
from sharded_models import make_model

from trainer.torch_backend import TorchBackend

SEQUENCE = {"tensor": 2, "sequence": True}
SMALL = {"micro_batch_tokens": 24}  # several micro-batches on each copy of the model
Case = tuple[str, dict[str, Any], dict[str, Any]]
ON_TWO: list[Case] = [
    ("dense", {"data": 2}, SMALL),
    ("dense", SEQUENCE, {"updates_per_batch": 2}),
    ("mixture", {"data": 2, "expert": 2}, SMALL | {"updates_per_batch": 2}),
    ("leading", {"pipeline": 2}, SMALL | {"expert_adapters": "shared_outer"}),
]
ON_FOUR: list[Case] = [
    ("dense", {"pipeline": 2, "data": 2}, SMALL),
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, SMALL | {"activation_checkpointing": True}),
    ("mixture", SEQUENCE | {"pipeline": 2, "expert": 2}, {}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backends")


@cache
def model(folder: Path, kind: str) -> Path:
    return make_model(kind, folder / kind)


def lives(folder: Path, world: int, cases: list[Case]) -> list[tuple[Case, dict[str, Any]]]:
    payload = []
    for number, (kind, parallel, trainer) in enumerate(cases):
        own = folder / f"{world}-{number}"
        own.mkdir()
        payload.append(
            {"model": str(model(folder, kind)), "folder": str(own), "trainer": trainer, "parallel": parallel}
        )
    by_rank = run_ranks(world, f"{live.__module__}:{live.__name__}", payload, timeout=280)
    for others in by_rank[1:]:
        for one, other in zip(by_rank[0], others, strict=True):
            same(one, other, 0.0)
    return list(zip(cases, by_rank[0], strict=True))


@pytest.mark.parametrize(("world", "cases"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.long)])
def test_a_backends_life_is_the_torch_backends_over_any_ranks(
    world: int, cases: list[Case], folder: Path, tmp_path: Path
) -> None:
    for (kind, parallel, trainer), found in lives(folder, world, cases):
        expected = life(make(TorchBackend, model(folder, kind), trainer, "cpu"), tmp_path)
        assert found.pop("again") == (True, True), parallel
        expected.pop("again")
        # Of all passes of a step together: the parts of two updates, each dealt out for itself, are far less even.
        bound = 1.1 if trainer.get("updates_per_batch") else 1.06
        for step in ("step 0", "step 1"):
            assert 1 <= (imbalance := found[step].pop("rank_imbalance")) < bound, (parallel, step, imbalance)
        assert found["alone"].pop("rank_imbalance") == parallel.get("data", 1), parallel
        try:
            same(found, expected, 2e-5)
        except AssertionError as error:
            raise AssertionError(f"{kind} {parallel} {trainer}: {error}") from error

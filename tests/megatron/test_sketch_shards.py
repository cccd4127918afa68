"""Kind "sketch" over ranks: the torch backend's policies, files and checkpoints, and receivers get the ranks' weights.

A rank's sums are of another order than one process's, so sketches are equal to float32's precision alone. What is made
of them is equal to the bit: the torch backend, given the sketches of the ranks, writes their files.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rank_pool import run_ranks
from sharded_models import make_model
from sketch_lives import check_case, check_files, check_receiver, life, live, make

from trainer.torch_backend import TorchBackend

SEQUENCE = {"tensor": 2, "sequence": True}
SMALL = {"micro_batch_tokens": 24}
MOMENTUM = {"momentum": 0.5, "redraw_every": 2, "updates_per_batch": 2}
Case = tuple[str, dict[str, Any], dict[str, Any]]
ON_TWO: list[Case] = [
    ("dense", {"tensor": 2}, MOMENTUM),
    ("mixture", SEQUENCE, SMALL),
    ("mixture", {"data": 2, "expert": 2}, MOMENTUM | {"ranks": {"up_proj": 4}}),
]
MORE_ON_TWO: list[Case] = [
    ("tied", {"pipeline": 2}, {"ranks": {"q_proj": 4, "down_proj": 16}}),
    ("dense", {"data": 2}, {"publish": "snapshots", "targets": ("q_proj", "down_proj")}),
]
ON_FOUR: list[Case] = [
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, {"activation_checkpointing": True}),
    ("mixture", SEQUENCE | {"pipeline": 2, "expert": 2}, MOMENTUM),
]

MORE = pytest.param(2, MORE_ON_TWO, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sketches")


@cache
def model(folder: Path, kind: str) -> Path:
    return make_model(kind, folder / kind)


@pytest.mark.parametrize(("world", "cases"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.long), MORE])
def test_ranks_lead_the_life_of_the_torch_backend(world: int, cases: list[Case], folder: Path, tmp_path: Path) -> None:
    payload, wanted = [], []
    for number, (kind, parallel, trainer) in enumerate(cases):
        ours, theirs = tmp_path / f"ranks-{number}", tmp_path / f"torch-{number}"
        ours.mkdir()
        theirs.mkdir()
        wanted.append(life(make(TorchBackend, model(folder, kind), trainer, "cpu"), theirs))
        shutil.copytree(theirs / "checkpoint", theirs / "broken")
        os.truncate(theirs / "broken" / "sketch.safetensors", 1000)
        payload.append(
            {"model": str(model(folder, kind)), "folder": str(ours), "trainer": trainer, "parallel": parallel,
             "theirs": str(theirs)}
        )  # fmt: skip
    by_rank = run_ranks(world, f"{live.__module__}:{live.__name__}", payload, timeout=280)
    for number, (case, one) in enumerate(zip(cases, wanted, strict=True)):
        lives = [found[number]["life"] for found in by_rank]
        assert all(each == lives[0] for each in lives), case
        assert all("sketch.safetensors" in found[number]["said"] for found in by_rank)
        ours, theirs = tmp_path / f"ranks-{number}", tmp_path / f"torch-{number}"
        check_case(case[2], model(folder, case[0]), ours, theirs, lives[0], one)
        if case[2].get("publish") != "snapshots":
            check_receiver(model(folder, case[0]), ours)
            check_files(case[2], model(folder, case[0]), ours, tmp_path / f"again-{number}", by_rank[0][number]["kept"])

"""Kind "sketch" over FSDP's ranks: the policies, files and checkpoints of one process, and receivers get the ranks'
weights. What is made of the same sketches is equal to the bit, also where weights are rounded to bfloat16."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_pool import run_ranks
from sharded_models import make_model
from sketch_lives import check_case, check_files, check_receiver, life, live_in_parts, make

from trainer.torch_backend import TorchBackend

pytestmark = [pytest.mark.scale, pytest.mark.timeout(400)]

Case = tuple[str, str, dict[str, Any]]
MOMENTUM = {"momentum": 0.5, "redraw_every": 2, "updates_per_batch": 2}
CASES: dict[int, list[Case]] = {
    2: [
        ("dense", "float32", MOMENTUM | {"ranks": {"q_proj": 4, "down_proj": 16}}),
        ("tied", "bfloat16", {"micro_batch_tokens": 24, "update_ratio": 1e-2}),
    ],
    4: [
        ("tied", "float32", {"micro_batch_tokens": 24, "activation_checkpointing": True}),
        ("dense", "float32", {"publish": "snapshots", "targets": ("q_proj", "down_proj")}),
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_ranks_lead_the_life_of_one_process(world: int, tmp_path: Path) -> None:
    payload, wanted = [], []
    models = {kind: make_model(kind, tmp_path / kind) for kind in ("dense", "tied")}
    for number, (kind, dtype, trainer) in enumerate(CASES[world]):
        ours, theirs = tmp_path / f"ranks-{number}", tmp_path / f"torch-{number}"
        ours.mkdir()
        theirs.mkdir()
        wanted.append(life(make(TorchBackend, models[kind], trainer, "cpu", dtype), theirs))
        shutil.copytree(theirs / "checkpoint", theirs / "broken")
        os.truncate(theirs / "broken" / "sketch.safetensors", 1000)
        payload.append(
            {"model": str(models[kind]), "folder": str(ours), "trainer": trainer, "dtype": dtype, "theirs": str(theirs)}
        )
    by_rank = run_ranks(world, f"{live_in_parts.__module__}:{live_in_parts.__name__}", payload, timeout=280)
    for number, ((kind, dtype, trainer), one) in enumerate(zip(CASES[world], wanted, strict=True)):
        lives = [found[number]["life"] for found in by_rank]
        assert all(each == lives[0] for each in lives), trainer
        assert all("sketch.safetensors" in found[number]["said"] for found in by_rank)
        ours, theirs = tmp_path / f"ranks-{number}", tmp_path / f"torch-{number}"
        if dtype == "float32":  # of what is rounded at random another last bit of a sketch is another weight
            check_case(trainer, models[kind], ours, theirs, lives[0], one)
        else:
            assert lives[0]["metrics"][0]["rounding_noise"] == pytest.approx(
                one["metrics"][0]["rounding_noise"], rel=0.05
            )
        if trainer.get("publish") != "snapshots":
            check_receiver(models[kind], ours, dtype)
            check_files(trainer, models[kind], ours, tmp_path / f"again-{number}", by_rank[0][number]["kept"], dtype)

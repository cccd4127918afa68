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
import torch
from rank_pool import run_ranks
from sharded_models import make_model
from sketch_lives import RATE, STEPS, life, live, make, tensors
from transformers import AutoModelForCausalLM

from async_rl.policy.experts import expert_modules, expert_weights
from async_rl.policy.update_file import apply_update, read_update, weights_digest
from trainer.torch_backend import TorchBackend

SEQUENCE = {"tensor": 2, "sequence": True}
SMALL = {"micro_batch_tokens": 24}
MOMENTUM = {"momentum": 0.5, "redraw_every": 2, "updates_per_batch": 2}
Case = tuple[str, dict[str, Any], dict[str, Any]]
ON_TWO: list[Case] = [
    ("dense", {"tensor": 2}, MOMENTUM),
    ("mixture", SEQUENCE, SMALL),
    ("tied", {"pipeline": 2}, {"ranks": {"q_proj": 4, "down_proj": 16}}),
    ("mixture", {"data": 2, "expert": 2}, MOMENTUM | {"ranks": {"up_proj": 4}}),
    ("dense", {"data": 2}, {"publish": "snapshots", "targets": ("q_proj", "down_proj")}),
]
ON_FOUR: list[Case] = [
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, {"activation_checkpointing": True}),
    ("mixture", SEQUENCE | {"pipeline": 2, "expert": 2}, MOMENTUM),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sketches")


@cache
def model(folder: Path, kind: str) -> Path:
    return make_model(kind, folder / kind)


@pytest.mark.parametrize(("world", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
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
        check_case(case, model(folder, case[0]), ours, theirs, lives[0], one)
        if case[2].get("publish") != "snapshots":
            check_receiver(model(folder, case[0]), ours)
            check_files(case, model(folder, case[0]), ours, tmp_path / f"again-{number}", by_rank[0][number]["kept"])


def check_case(case: Case, path: Path, ours: Path, theirs: Path, found: dict[str, Any], one: dict[str, Any]) -> None:
    assert found["modules"] == one["modules"]
    assert found["digests"][0] == one["digests"][0], "the base"
    steps = STEPS * case[2].get("updates_per_batch", 1)
    more = 2 * case[2].get("updates_per_batch", 1)
    assert found["exact"] == one["exact"] == (True, True, True, steps + more), case
    assert found["nothing"] == one["nothing"] == (True, True)
    assert found["theirs"] == [one["digests"][-1], steps]
    assert (ours / "unchanged").read_bytes() == (theirs / "whole").read_bytes()
    for mine, other in zip(found["metrics"], one["metrics"], strict=True):
        mine.pop("rank_imbalance")
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5), case
    snapshots = tensors(ours / "whole"), tensors(theirs / "whole")
    worst = max(float((snapshots[0][name] - each).abs().max()) for name, each in snapshots[1].items())
    moved = max(float((snapshots[1][name] - each).abs().max()) for name, each in base_of(model_of(path)).items())
    same = sum(mine == other for mine, other in zip(found["digests"], one["digests"], strict=True))
    print(f"{case}: weights moved by {moved:.1e}, differ by {worst:.1e}; {same} of {STEPS + 1} digests are equal")
    assert worst <= 1e-6 < 1e-4 < moved, case
    assert (ours / "again").read_bytes() == (ours / f"v{STEPS}").read_bytes()
    final = base_of(model_of(theirs / "final"))
    for name, each in base_of(model_of(ours / "final")).items():
        torch.testing.assert_close(each, final[name], rtol=0, atol=2e-6)


def check_receiver(path: Path, ours: Path) -> None:
    """The base, with the published files applied as nodes apply them, is what the ranks have, bit for bit."""
    received = model_of(path)
    weights = {name: layer.weight.detach() for name, layer in received.named_modules() if hasattr(layer, "weight")}
    for where, module in expert_modules(received).items():
        weights |= {f"{where}.{name}": weight for name, weight in expert_weights(module).items()}
    for number in range(1, STEPS + 1):
        apply_update(read_update(ours / f"v{number}"), weights)
    assert weights_digest(base_of(received)) == weights_digest(tensors(ours / "whole"))


def check_files(case: Case, path: Path, ours: Path, folder: Path, kept: list[tuple[dict[str, Any], float]]) -> None:
    """Of the ranks' sketches one process makes their files, to the byte."""
    folder.mkdir()
    learnable = make(TorchBackend, path, case[2], "cpu").learnable
    updates = case[2].get("updates_per_batch", 1)
    for number in range(1, STEPS + 1):
        for views, energy in kept[(number - 1) * updates : number * updates]:
            for name, view in learnable.sketches.views.items():
                view.copy_(torch.from_numpy(views[name]))
            assert energy == pytest.approx(float(learnable.energy), rel=1e-6)
            learnable.energy = torch.tensor(energy, dtype=torch.float64)
            learnable.move(1.0, RATE)
        learnable.export(folder / "file")
        assert (folder / "file").read_bytes() == (ours / f"v{number}").read_bytes(), case


def model_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def base_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}

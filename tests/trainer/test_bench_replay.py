"""The benchmark of router replay measures what it says: one model in two programs, which agree where routes do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer.bench_replay import QUICK, STEPS, Rounds, Shape, draw_model


def test_the_drawn_model_is_the_same_for_a_seed_and_its_router_decides_something(tmp_path: Path) -> None:
    shape = Shape(2, 64, 8, 2, 32)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        draw_model(shape, seed, tmp_path / name)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "abc"]
    gate = "model.layers.1.mlp.gate.weight"
    assert torch.equal(models[0][gate], models[1][gate])
    assert not torch.equal(models[0][gate], models[2][gate])
    assert 0.8 < float(models[0][gate].std()) * 64**0.5 < 1.2


@pytest.mark.slow
def test_with_an_engine_of_the_trainers_precision_nothing_differs_with_or_without_replay(tmp_path: Path) -> None:
    rounds = Rounds(QUICK.shapes[0], "", ["inference.dtype=float32"], QUICK, tmp_path)
    for which in ("live", "replayed"):
        measures = rounds.measure(0, which)
        assert measures["tokens"] == measures["choices"] == measures["gap_differing"] == 0
        assert measures["gap"] < 1e-5
    assert rounds.measure(STEPS, "live")["gap"] > 1e-3  # the trainer has moved

"""Passes through the pipeline where ranks have unlike work: nobody waits for somebody who has nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rank_pool import run_ranks
from sharded_models import make_model
from sharded_passes import of_one_process

LAST_LAYERS = {"parallel": {"pipeline": 2}, "of_rank": [[0, 1, 2]], "layers": [2, 3]}
ONE_MICRO_BATCH = {"parallel": {"pipeline": 2}, "of_rank": [[2]], "layers": [0, 1, 2, 3]}
NOBODY_LEARNS = {"parallel": {"pipeline": 2}, "of_rank": [[0, 1]], "layers": []}
# The second data rank has experts that the first one's tokens go to, and nothing of its own.
NOTHING_WANTED = {
    "parallel": {"data": 2, "expert": 2},
    "of_rank": [[0, 3], [None, 1]],
    "layers": [0, 1, 2, 3],
}


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    paths = {kind: str(make_model(kind, tmp_path / kind)) for kind in ("dense", "mixture")}
    cases: list[dict[str, Any]] = [
        {"path": paths["dense"]} | LAST_LAYERS,
        {"path": paths["dense"]} | ONE_MICRO_BATCH,
        {"path": paths["dense"]} | NOBODY_LEARNS,
        {"path": paths["mixture"]} | NOTHING_WANTED,
    ]
    for case, *by_rank in zip(cases, *run_ranks(2, "sharded_passes:compute", cases), strict=True):
        found = {name: gradient for gradients in by_rank for name, gradient in gradients.items()}
        assert set(found) == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in case["layers"]}
        wanted = of_one_process(
            case["path"], [which for mine in case["of_rank"] for which in mine if which is not None]
        )
        for name, gradient in found.items():
            gap = float((gradient - wanted[name]).abs().max() / wanted[name].abs().max())
            assert gap <= 1e-5, (case, name, gap)

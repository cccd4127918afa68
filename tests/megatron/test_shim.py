from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_pool import RankFailed, run_ranks
from sharded_models import make_model

from trainer.megatron import shim

PARALLEL = {"tensor": 2, "data": 2, "sequence": True, "expert": 2, "expert_tensor": 2}


def test_with_a_gpu_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = [(entry.owner, entry.name, getattr(entry.owner, entry.name)) for entry in shim.entries()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shim, "_installed", False)
    shim.install()
    assert all(getattr(owner, name) is value for owner, name, value in stock)
    assert not shim._installed


def test_nothing_that_is_put_in_place_could_be_left_out(tmp_path: Path) -> None:
    case = {"path": str(make_model("mixture", tmp_path)), "parallel": PARALLEL, "recompute": False, "learns": True}
    run_ranks(4, "sharded_models:compute_without", {"without": None, "case": case})
    for entry in shim.entries():
        with pytest.raises(RankFailed, match=r"Error: .*(CUDA|all_to_all_single|invalid tensor size)"):
            run_ranks(4, "sharded_models:compute_without", {"without": entry.name, "case": case})

from __future__ import annotations

import pytest
import torch

from trainer.megatron import shim


def test_with_a_gpu_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(torch.cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shim, "_installed", False)
    shim.install()
    assert {name for name, value in vars(torch.cuda).items() if before.get(name) is not value} == {"is_available"}
    assert not shim._installed

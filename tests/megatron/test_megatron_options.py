"""What algorithms may ask of a backend (score centring, router replay), the Megatron one computes as the torch one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_options import CENTRED, make, stepped, steps
from backend_ranks import ALGORITHM
from rank_pool import RankFailed, run_ranks
from sharded_models import make_model

from async_rl.config import AlgorithmConfig
from trainer.torch_backend import TorchBackend

SEQUENCE = {"tensor": 2, "sequence": True}
SMALL = {"micro_batch_tokens": 24}  # several micro-batches on each copy of the model
TWICE = SMALL | {"updates_per_batch": 2}
ROLLOUT = ALGORITHM | {"router_replay": "rollout"}
RECORDED = ALGORITHM | {"router_replay": "trainer"}
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (CENTRED, SEQUENCE | {"data": 2, "expert": 2}, SMALL),
    (ROLLOUT, SEQUENCE | {"pipeline": 2, "expert": 2}, SMALL | {"activation_checkpointing": True}),
    (RECORDED, {"pipeline": 2, "data": 2, "expert": 2}, TWICE),
]


def test_score_centring_and_router_replay_are_the_torch_backends(tmp_path: Path) -> None:
    model = str(make_model("mixture", tmp_path))
    payload = [
        {"model": model, "algorithm": algorithm, "trainer": trainer, "parallel": parallel}
        for algorithm, parallel, trainer in CASES
    ]
    found = run_ranks(4, f"{stepped.__module__}:{stepped.__name__}", payload)[0]
    for (algorithm, parallel, trainer), ours in zip(CASES, found, strict=True):
        config = AlgorithmConfig(**algorithm)
        theirs = steps(make(TorchBackend, model, config, trainer, "cpu"), config)
        for one, other in zip(ours, theirs, strict=True):
            one["metrics"].pop("rank_imbalance")
            assert one["metrics"].keys() == other["metrics"].keys()
            for name, value in one["metrics"].items():
                assert value == pytest.approx(other["metrics"][name], rel=2e-5, abs=2e-5), (name, parallel, algorithm)
            for mine, their in zip(one["proximal"], other["proximal"], strict=True):
                assert float(np.abs(mine - their).max()) <= 2e-5 * max(1.0, float(np.abs(their).max()))
        if config.router_replay == "rollout":
            assert 0 < ours[0]["metrics"]["replay_missing"] < 1
            assert ours[0]["metrics"]["replay_changed"] > 0.5


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (CENTRED | {"center_scores": 68}, "center_scores = 68: the model's vocabulary has 67 tokens"),
        (ROLLOUT, 'router_replay = "rollout": the model has no experts'),
    ],
)
def test_what_the_model_does_not_have_is_refused(tmp_path: Path, algorithm: dict[str, Any], message: str) -> None:
    case = {
        "model": str(make_model("dense", tmp_path)), "algorithm": algorithm, "trainer": {}, "parallel": {}
    }  # fmt: skip
    with pytest.raises(RankFailed, match=f"ConfigError: .*{message}"):
        run_ranks(1, "backend_options:stepped", [case])

"""What the trainer makes of results of evaluation, and which policy `async-rl eval` takes."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import msgspec
import pytest

from async_rl.config import config_from_table
from async_rl.version import PolicyId
from async_rl.wire.messages import EvalRequest, EvalResult, SamplingParams
from trainer.best import Best, Score
from trainer.evaluate import choose
from trainer.evaluating import Evaluating

POLICY = PolicyId("main", 3, "d" * 64)


class Pins:
    def __init__(self) -> None:
        self.pinned: dict[PolicyId, bool] = {}

    def pin(self, policy: PolicyId, pinned: bool) -> None:
        self.pinned[policy] = pinned


def result(*rewards: float) -> EvalResult:
    return EvalResult(POLICY, len(rewards), 0.0, 0, 1.0, "eval", struct.pack(f"<{len(rewards)}d", *rewards))


def test_a_result_of_as_many_samples_as_an_older_config_asked_for_is_not_taken_for_the_one_that_is_to_come(
    tmp_path: Path,
) -> None:
    config = config_from_table(
        {"model": {"path": "x"}, "task": {"kind": "digit_sort"}, "run": {"eval_every": 3, "eval_samples": 3}}, "test"
    )
    asked, pins = EvalRequest(POLICY, 3, SamplingParams(0.0, 16), 30.0), Pins()
    evaluating = Evaluating(config, Best(tmp_path, "", Path.mkdir, []), pins, [asked])  # type: ignore[arg-type]
    evaluating.pin()
    assert evaluating.take(result(1.0, 1.0)) is None
    assert (evaluating.pending, pins.pinned) == ((asked,), {POLICY: True})
    record = evaluating.take(result(1.0, 0.0, 1.0))
    assert record is not None
    assert (record["reward"], record["n"]) == (pytest.approx(2 / 3), 3)
    assert (evaluating.pending, pins.pinned) == ((), {POLICY: False})


def test_the_newest_checkpoint_is_evaluated_and_neither_the_best_nor_an_older_final_policy(tmp_path: Path) -> None:
    for version in (7, 9):
        (tmp_path / "checkpoints" / f"v{version:08d}").mkdir(parents=True)
    best = tmp_path / "adapters" / "best"
    best.mkdir(parents=True)
    (best / "evaluation.json").write_bytes(msgspec.json.encode(Score(3, "d", "eval", 0.5, 8)))
    assert choose(tmp_path, "") == ("9", tmp_path / "checkpoints" / "v00000009")
    assert choose(tmp_path, "best") == ("best", best)
    (tmp_path / "adapters" / "final").mkdir()
    assert choose(tmp_path, "")[0] == "9"
    shutil.rmtree(tmp_path / "checkpoints")
    assert choose(tmp_path, "")[0] == "final"

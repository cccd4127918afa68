"""A reward that crashes by chance biases nothing: what trains is worth what it is worth."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import real_runs
from slow_rewards import prepare, settings

from async_rl.bundle import trajectories_of
from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.tasks.rendering import decode
from async_rl.trajectory import MaskReason, segment_arrays
from buffer.recorder import recorded_batches
from trainer.tiny_model import char_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.tasks, pytest.mark.timeout(750)]

ROOT = Path(__file__).resolve().parents[2]
STEPS, ATTEMPTS = 6, 6 * 4 * 8


def test_attempts_whose_reward_crashed_are_scored_again_then_dropped_and_none_trains_with_a_0(
    shell: real_runs.Shell,
) -> None:
    """A quarter of all scorings fail, half of these with their worker: of two in a row, one attempt in sixteen."""
    run = shell.folder / "run"
    code, output = shell.run(
        "run", str(prepare(shell)), "--out", str(run),
        *settings(
            task__crashes=0.25, inference__score_tries=2, inference__reward_workers=4, run__steps=STEPS,
            run__eval_every=0, trainer__checkpoint_every=STEPS,
        ),
        timeout=500, PYTHONPATH=os.pathsep.join([str(shell.folder), str(ROOT)]),
    )  # fmt: skip
    assert code == 0, output
    ledger = real_runs.summary(run)["ledger"]
    dropped = ledger["dropped"]["env_failed"]
    assert ledger["trained"] == ATTEMPTS
    assert ledger["issued"] == ATTEMPTS + sum(ledger["dropped"].values())
    assert dropped > 0
    logs = "".join(path.read_text() for path in (run / "logs").glob("node-*.log"))
    assert "has no score: scoring failed: RuntimeError: by chance (2 times in a row)" in logs or (
        "has no score: the scoring worker died (exit code 7) (2 times in a row)" in logs
    )
    task, tokenizer = DigitSort(DigitSortConfig()), char_tokenizer()
    rewards = []
    run_id = json.loads((run / "run.json").read_text())["run"]
    for lent in recorded_batches(run / "journal", run_id, 0).values():
        numbers = [group.instance for group in lent.groups for _ in range(group.size)]
        attempts = [trajectory for payload in lent.payloads for trajectory in trajectories_of(payload)]
        for number, trajectory in zip(numbers, attempts, strict=True):
            (arrays,) = segment_arrays(trajectory)
            said = decode(arrays.tokens[arrays.mask == MaskReason.SAMPLED], tokenizer)
            assert trajectory.status == "ok"
            assert trajectory.reward == task.score(task.instance("train", number), said).reward
            rewards.append(trajectory.reward)
    assert len(rewards) == ATTEMPTS
    assert 0 < sum(rewards) < ATTEMPTS

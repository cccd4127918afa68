"""A real run that goes wrong ends with an alarm's words, and its last checkpoint is worth going on from."""

from __future__ import annotations

import math

import pytest
import real_runs

from trainer.checkpoint import find_latest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_learning_rate_20_times_too_high_ends_with_the_alarms_words_and_a_checkpoint_from_before(shell):
    run = shell.folder / "too-fast"
    same = ("--set", "run.eval_every=0", "--set", "trainer.checkpoint_every=2", "--out", str(run))
    code, output = shell.run("run", "quickstart", "--set", "trainer.learning_rate=4e-2", *same, timeout=380)
    assert code == 1, output
    words = " ".join(output.split())
    assert "alarm: step" in words
    assert "over the last 3 steps" in words
    assert "What to do: lower trainer.learning_rate (now 0.04)" in words
    steps = real_runs.records(run)
    assert len(steps) < 20  # of 200
    assert all(math.isfinite(step[key]) for step in steps for key in ("loss", "grad_norm", "k3", "reward"))
    found = find_latest(run / "checkpoints")
    assert found is not None
    assert found.version < steps[-1]["version"]  # what came after it was not kept
    assert f"The last checkpoint is of version {found.version}" in words
    # Alarms may differ in a run that is resumed: its data is still what the old policy sampled.
    code, output = shell.run(
        "run", "quickstart", "--set", "trainer.learning_rate=2e-3", "--set", "algorithm.alarms.action=warn",
        "--set", f"run.steps={found.version + 2}", *same, "--resume", timeout=380,
    )  # fmt: skip
    assert code == 0, output
    assert real_runs.summary(run)["steps"] == found.version + 2

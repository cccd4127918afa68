"""A node that is far too slow for the bound: with on_stale = "drop" and "mask" nobody waits for it, and what that costs
is in the books and in the summary."""

from __future__ import annotations

import pytest
import real_runs

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(750)]

BOUND = 1


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_straggler_is_overtaken_and_no_token_beyond_the_bound_trains(shell, on_stale):
    folder = shell.folder / on_stale
    arguments = [
        str(shell.config), "--out", str(folder), "--set", "run.steps=40", "--set", "run.eval_every=0",
        "--set", f"buffer.max_staleness={BOUND}", "--set", f"buffer.on_stale={on_stale}", "--set", "inference.slots=8",
    ]  # fmt: skip
    buffer = shell.start("buffer", *arguments)
    real_runs.wait_for((folder / "run.json").exists, 60, "the run directory")
    # Its answers take some twenty seconds, in which the others make many steps.
    slow = shell.start("infer", *arguments, "--name", "slow", "--set", "inference.max_tokens_per_second=8")
    trainer = shell.start("train", *arguments)
    fast = shell.start("infer", *arguments, "--name", "fast")
    for process in (trainer, fast, slow, buffer):
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    summary = real_runs.summary(folder)
    assert summary["steps"] == 40
    assert summary["ledger_balances"]
    assert summary["staleness"]["max"] <= BOUND
    assert summary["ledger"]["trained"] == 40 * 4 * 8
    assert summary["ledger"]["dropped"]["stale"] > 0
    assert summary["length_bias"]["trained"] == 40 * 4 * 8
    low, high = summary["length_bias"]["interval"]
    assert low <= summary["length_bias"]["ks"] <= high

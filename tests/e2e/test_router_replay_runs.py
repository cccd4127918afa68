"""A whole run whose trainer sends tokens where two nodes' engines sent them, in another precision than its own."""

from __future__ import annotations

import pytest
import real_runs
from real_runs import Shell

from trainer.bench_replay import Shape, draw_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]


def test_every_choice_of_the_engines_reaches_the_trainer(shell: Shell) -> None:
    draw_model(Shape(3, 64, 16, 2, 32), 0, shell.folder / "model")
    run = shell.folder / "run"
    code, output = shell.run(
        "run", str(shell.config), "--set", f"model.path={shell.folder / 'model'}", "--set", "run.steps=3",
        "--set", "algorithm.router_replay=rollout", "--set", "inference.dtype=bfloat16", "--out", str(run), timeout=450,
    )  # fmt: skip
    assert code == 0, output
    steps = real_runs.records(run)
    assert [step["replay_missing"] for step in steps] == [0, 0, 0]
    # Rounding alone sends some tokens elsewhere; routes shifted by a position or a layer would send most of them.
    assert 0 < max(step["replay_changed"] for step in steps) < 0.2
    ledger = real_runs.summary(run)["ledger"]
    assert ledger["dropped"].get("refused", 0) == 0
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())

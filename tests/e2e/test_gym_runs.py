"""Tasks of reasoning-gym by one line of a config, and one of them learned."""

from __future__ import annotations

import pytest
import real_runs

from async_rl.run.metrics import evals_of, read_metrics

pytest.importorskip("reasoning_gym")
pytestmark = [pytest.mark.e2e, pytest.mark.tasks, pytest.mark.timeout(1000)]

SHORT = ["--set", "run.steps=2", "--set", "run.eval_samples=16", "--set", "buffer.groups_per_step=4",
         "--set", "inference.nodes=1", "--set", "model.tiny.accuracy_low=0.05"]  # fmt: skip


OTHERS = ("spell_backward", "letter_counting", "count_bits", "syllogism")
MORE = [pytest.param(name, marks=pytest.mark.long) for name in OTHERS]


@pytest.mark.parametrize("name", ["gcd", *MORE])
def test_a_task_is_another_one_by_one_line(shell, name):
    run = shell.folder / name
    code, output = shell.run(
        "run", "quickstart-gym", "--set", f"task.name={name}", "--out", str(run), *SHORT, timeout=950
    )
    assert code == 0, output
    assert len(real_runs.records(run)) == 2
    assert real_runs.summary(run)["ledger"]["trained"] == 2 * 4 * 8


@pytest.mark.long
def test_a_model_learns_to_spell_backward(shell):
    run = shell.folder / "run"
    steps = ["--set", "run.steps=40", "--set", "run.eval_every=40"]
    code, output = shell.run("run", "quickstart-gym", "--out", str(run), *steps, timeout=950)
    assert code == 0, output
    rewards = [record["reward"] for record in real_runs.records(run)]
    assert sum(rewards[-10:]) > 1.05 * sum(rewards[:10])  # of 2560 attempts each
    first, last = [each["reward"] for each in evals_of(read_metrics(run / "metrics.jsonl"))]
    assert last > first

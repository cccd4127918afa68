"""A run whose reward is what programs do: nodes run what the model writes, in cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import real_runs
from cells import sandbox_or_skip

pytestmark = [pytest.mark.e2e, pytest.mark.tasks, pytest.mark.long, pytest.mark.timeout(1000)]

# The model of the small run writes digits: behind this they are programs, unless they begin with a zero.
PROMPT = "def f():\n    return "
TESTS = "assert f() > 9\nassert f() % 2 == 0\nassert len(str(f())) == 8"
SETTINGS = ["--set", "run.steps=2", "--set", "run.eval_every=2", "--set", "inference.max_context=40"]
TASK = """
[task]
kind = "human_eval"
style = "plain"
path = "problems.jsonl"
eval_path = "problems.jsonl"

[[task.reward]]
kind = "code"
value = "fraction"
wall = 60.0

[[task.reward]]
kind = "format"
pattern = "[0-9]+"
weight = 0.5
"""


@pytest.fixture(autouse=True)
def _isolated():
    yield from sandbox_or_skip()


def code_config(shell: real_runs.Shell) -> Path:
    path = real_runs.own_task(shell, "code.toml", TASK)
    problem = {"prompt": PROMPT, "test": TESTS, "entry_point": "f", "canonical_solution": "12345678\n"}
    (shell.folder / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    return path


def test_a_model_is_trained_on_what_its_programs_do(shell: real_runs.Shell) -> None:
    run = shell.folder / "run"
    code, output = shell.run("run", str(code_config(shell)), "--out", str(run), *SETTINGS, timeout=600)
    assert code == 0, output
    assert real_runs.summary(run)["ledger"]["trained"] == 2 * 4 * 8
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    parts = [sample["components"] for sample in samples]
    assert parts
    for sample, each in zip(samples, parts, strict=True):
        assert {"code", "code.compiled", "code.passed", "format"} <= each.keys()
        assert sample["reward"] == pytest.approx(each["code"] + 0.5 * each["format"])
        assert each["code"] == each["code.passed"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
    assert any(each["code.compiled"] and each["code.passed"] > 0 for each in parts)

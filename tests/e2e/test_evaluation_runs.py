"""Evaluation of whole runs: several sets while it trains, the best version kept, and the same numbers afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import PeftModel
from real_runs import SMALL, Shell
from transformers import AutoModelForCausalLM

from async_rl.run.metrics import eval_sets_of, read_metrics

pytestmark = [pytest.mark.tasks, pytest.mark.timeout(750)]

SETS = """
[[run.eval]]
name = "greedy"

[[run.eval]]
name = "short"
instances = 16
samples = 4
temperature = 1.0
every = 2

[run.eval.task]
kind = "digit_sort"
digits = 7

[model.tiny]"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("evaluation"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def several(shell: Shell) -> Path:
    """A run of six steps with two sets; its directory."""
    shell.config.write_text(SMALL.replace("[model.tiny]", SETS.strip(), 1))
    code, output = shell.run("run", str(shell.config), "--out", "several")
    assert code == 0, output
    return shell.folder / "several"


def test_sets_are_evaluated_while_it_trains_the_best_is_kept_and_afterwards_they_come_out_the_same(
    shell: Shell, several: Path
) -> None:
    sets = eval_sets_of(read_metrics(several / "metrics.jsonl"))
    summary = json.loads((several / "summary.json").read_text())
    assert {name: [item["version"] for item in items] for name, items in sets.items()} == {
        "greedy": [0, 3, 6], "short": [0, 2, 4, 6]
    }
    assert [(item["n"], item["cancelled"]) for item in sets["short"]] == [(64, 0)] * 4
    trained, evaluated = summary["ledger"]["trained"], summary["eval_ledger"]["evaluated"]
    assert (trained, evaluated) == (6 * 4 * 8, 3 * 32 + 4 * 64)
    assert summary["ledger_balances"]
    assert set(summary["eval"]["sets"]) == {"greedy", "short"}

    best = max(sets["greedy"], key=lambda item: (item["reward"], -item["version"]))
    assert (summary["best"]["version"], summary["best"]["reward"]) == (best["version"], best["reward"])
    base = json.loads((several / "adapters" / "best" / "adapter_config.json").read_text())["base_model_name_or_path"]
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), several / "adapters" / "best")

    for version, expected in (("final", sets["greedy"][-1]), ("best", best)):
        code, output = shell.run("eval", str(several), "--version", version, "--json", "found.json")
        assert code == 0, output
        assert f"version {version} of" in output
        found = json.loads((shell.folder / "found.json").read_text())
        assert found["version"] == version
        assert found["sets"]["greedy"]["reward"] == expected["reward"]  # greedy, by the same engine
        assert found["sets"]["greedy"]["interval"] == expected["interval"]
        assert found["sets"]["short"]["n"] == 64


def test_a_version_that_is_not_kept_and_an_adapter_without_a_config_are_refused_with_what_there_is(
    shell: Shell, several: Path, tmp_path: Path
) -> None:
    code, output = shell.run("eval", str(several), "--version", "77")
    assert code == 1
    assert "there are base, 4, 6, " in output
    assert "best, final" in output
    alone = tmp_path / "alone"
    shutil.copytree(several / "adapters" / "best", alone)
    code, output = shell.run("eval", str(alone))
    assert code == 1
    assert "--config CONFIG" in output

"""A whole run on a mixture of experts, each expert with an adapter of its own."""

from __future__ import annotations

import json
import re

import pytest
import real_runs
import torch
from peft import PeftModel
from real_runs import Shell
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SERVING = re.compile(r"serving policy (\d+)-([0-9a-f]{8})")


@pytest.mark.sample
@pytest.mark.parametrize("layout", ["each", "shared_outer"])
def test_the_mixture_quickstart_learns_on_one_process_and_two_nodes(shell: Shell, layout: str) -> None:
    """Canary and flip probe pass on both nodes (or they would be set aside), and what comes out is loaded by peft."""
    run = shell.folder / layout
    code, output = shell.run(
        "run", "quickstart-moe", "--set", "trainer.backend=torch", "--set", "trainer.parallel={}",
        "--set", f"trainer.expert_adapters={layout}",
        "--set", "run.steps=6", "--set", "run.eval_every=6", "--set", "run.eval_samples=64",
        "--out", str(run), timeout=500,
    )  # fmt: skip
    assert code == 0, output
    summary, last = real_runs.summary(run), real_runs.records(run)[-1]
    ledger = summary["ledger"]
    assert summary["steps"] == 6
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    ends = []
    for node in ("node-0", "node-1"):
        log = (run / "logs" / f"{node}.log").read_text()
        ends += SERVING.findall(log)[-1:]
        assert "quarantined" not in log
        assert "goes on serving" not in log
    assert ("6", last["digest"][:8]) in ends  # the last evaluation needs one of them
    assert real_runs.processes_of(run) == []
    final = run / "adapters" / "final"
    table = json.loads((final / "adapter_config.json").read_text())
    assert len(table["target_parameters"]) == 4
    base = AutoModelForCausalLM.from_pretrained(table["base_model_name_or_path"])
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        after = PeftModel.from_pretrained(base, str(final))(input_ids=ids).logits
    assert float((after - before).abs().max()) > 1e-3
    assert all(each.any() for each in load_file(final / "adapter_model.safetensors").values())

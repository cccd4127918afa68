"""The command that merges an adapter on several ranks, as people start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_ranks import random_adapter, trainer_config
from merged_adapters import merged_logits
from rank_pool import run_ranks
from sharded_models import make_model
from transformers import AutoModelForCausalLM

from async_rl.config import load_config
from async_rl.errors import AsyncRLError
from trainer.checkpoint import write_checkpoint
from trainer.export import read_policy
from trainer.megatron.export import export_merged

CONFIG = """
[run]
name = "merging"
[model]
path = "{path}"
device = "cpu"
[task]
kind = "digit_sort"
[trainer]
backend = "megatron"
rank = 4
alpha = 8
[trainer.parallel]
tensor = 2
sequence = true
expert = 2
"""


def merge(config: Path, checkpoint: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "trainer.megatron.export", str(config), str(checkpoint), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)


@pytest.mark.timeout(500)
def test_torchrun_writes_a_whole_model_of_a_checkpoint(tmp_path: Path) -> None:
    path = make_model("mixture", tmp_path / "model")
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(path=path))

    def save(folder: Path) -> None:
        folder.rmdir()  # the ranks make it
        case = {"path": str(path), "parallel": {"data": 2, "expert": 2}, "recompute": False, "trainer": {},
                "save": str(folder)}  # fmt: skip
        payload = {"tensors": random_adapter(path, trainer_config()), "cases": [case]}
        run_ranks(2, "lora_ranks:resume", payload)
        for beside in folder.parent.glob(f"{folder.name}.*"):
            beside.rename(tmp_path / beside.name.rpartition(".")[2])

    checkpoint = write_checkpoint(tmp_path / "checkpoints", 2, save, {})
    done = merge(config, checkpoint, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert f"from_pretrained('{tmp_path / 'whole'}')" in done.stdout
    policy = read_policy(checkpoint)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        wanted = merged_logits(base, policy.tensors, 2.0, ids)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)(ids).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with pytest.raises(AsyncRLError, match="exists and is not an empty folder"):
        export_merged(load_config(str(config)), checkpoint, tmp_path / "whole", torch.device("cpu"))


def test_what_cannot_be_written_is_one_message_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    path = make_model("dense", tmp_path / "model")
    (tmp_path / "file").touch()
    case = {"path": str(path), "parallel": {"pipeline": 2}, "recompute": False, "trainer": {}}
    folders = [str(tmp_path / "file" / "whole"), str(tmp_path / "full")]
    first, second = run_ranks(2, "lora_ranks:unwritable", {"case": case, "folders": folders})
    assert [f"{folders[0]}.partial cannot be written" in first[0], "No space left" in first[1]] == [True, True]
    assert second == [f"writing the whole model failed on rank 0: {said}" for said in first]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "model"]

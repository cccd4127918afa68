"""What DeepSpeed's ZeRO and async-rl hand to each other: models in Hugging Face's layout. Where deepspeed is there."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_ranks import KINDS, make, recorded
from sharded_models import make_model
from transformers import AutoModelForCausalLM

from trainer.export import export
from trainer.torch_backend import TorchBackend

pytestmark = [
    pytest.mark.scale,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]


def test_zero_trains_what_is_exported_and_what_it_writes_is_trained_on(tmp_path: Path) -> None:
    model = make_model("dense", tmp_path / "model")
    (samples,) = recorded(model, 1)
    ours = make(TorchBackend, model, KINDS["lora"])
    ours.step(samples, 1e-2)
    ours.export_final(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "merged", merged=True)
    theirs = tmp_path / "zero"
    theirs.mkdir()
    tokens = samples[3].tokens
    np.save(theirs / "tokens.npy", tokens[None].astype(np.int64))
    _zero(tmp_path / "merged", theirs)
    logits = np.load(theirs / "logits.npz")
    np.testing.assert_allclose(_logprobs(logits["before"], tokens), ours.logprobs([tokens])[0], atol=1e-4)
    assert abs(logits["after"] - logits["before"]).max() > 1e-3  # it learns
    again = make(TorchBackend, theirs, KINDS["lora"])
    np.testing.assert_allclose(_logprobs(logits["after"], tokens), again.logprobs([tokens])[0], atol=1e-4)
    assert not again.step(samples, 1e-3).skipped
    assert AutoModelForCausalLM.from_pretrained(theirs).dtype == torch.float32


def _logprobs(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    given = torch.from_numpy(logits[0, :-1]).log_softmax(-1)
    return given.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()


def _zero(model: Path, folder: Path, stage: int = 2) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).parents[1] / "support" / "zero_engine.py"), str(model), str(folder),
         str(stage)],
        env=os.environ | {"MASTER_PORT": port}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

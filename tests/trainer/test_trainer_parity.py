"""The trainer's half of `async-rl doctor`: the policies of a run that has not begun, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_lm import save_qwen3

from async_rl.config import Config, ModelConfig, TrainerConfig
from async_rl.policy.adapter import read_adapter
from async_rl.policy.update_file import read_base
from async_rl.proof import CANARY_FLOOR, mismatch
from async_rl.run import parity_files
from async_rl.run.parity_files import POLICIES, TRAINED, Policies, Trained
from trainer.parity import main, measure

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = save_qwen3(tmp_path_factory.mktemp("model"), std=0.25, **SIZES)
    return Config(model=ModelConfig(path=str(model)), task={"kind": "digit_sort"})


def halves(config: Config, folder: Path) -> tuple[Policies, Trained]:
    measure(config, folder)
    return parity_files.read(folder / POLICIES, Policies), parity_files.read(folder / TRAINED, Trained)


def test_a_fresh_adapter_is_the_base_model_to_the_bit_and_the_canary_is_far_from_it(
    config: Config, tmp_path: Path
) -> None:
    policies, trained = halves(config, tmp_path)
    tensors, _ = read_adapter(tmp_path / policies.base.name, policies.base.policy.digest)
    assert not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    assert policies.canary is not None
    assert trained.canary is not None
    read_adapter(tmp_path / policies.canary.name, policies.canary.policy.digest)
    assert trained.base.logprobs == trained.canary.base
    assert trained.base.modules == trained.canary.modules
    measured = mismatch(trained.base.logprobs, trained.canary.logprobs)
    assert measured is not None
    assert measured.max_dlogp >= CANARY_FLOOR
    assert set(trained.versions) == {"torch", "transformers", "peft"}


def test_of_whole_weights_there_is_the_base_alone(config: Config, tmp_path: Path) -> None:
    whole = msgspec.structs.replace(config, trainer=TrainerConfig(kind="full"))
    policies, trained = halves(whole, tmp_path)
    assert policies.canary is trained.canary is None
    assert read_base(tmp_path / policies.base.name).digest == policies.base.policy.digest
    assert np.isfinite(np.frombuffer(trained.base.logprobs, "<f4")).all()


def test_a_model_that_cannot_be_loaded_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text('[model]\npath = "/nowhere"\n[task]\nkind = "digit_sort"\n')
    assert main(["--config", str(tmp_path / "a.toml"), "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: [model] path = '/nowhere'")

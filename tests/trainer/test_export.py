from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from async_rl.config import AlgorithmConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from trainer.backend import Sample
from trainer.checkpoint import write_checkpoint
from trainer.export import export, main
from trainer.torch_backend import TorchBackend

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """A run directory with one checkpoint, the base model, and the trained policy's logits on IDS."""
    root = tmp_path_factory.mktemp("export")
    base = root / "base"
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=11,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(base)
    (base / "tokenizer_config.json").write_text("{}")
    backend = TorchBackend(
        base, trainer=TrainerConfig(rank=2), algorithm=AlgorithmConfig(), temperature=1.0, seed=0, device="cpu"
    )
    mask = np.array([1, 1, 0, 0, 0], np.uint8)
    sample = Sample(np.arange(5, dtype=np.int32), np.full(5, -2, np.float32), mask, np.zeros(5, np.int32), 1.0, 0, 0)
    for _ in range(5):
        backend.step([sample], 1e-2)
    write_checkpoint(root / "run" / "checkpoints", 5, backend.save, {})
    backend.export(root / "adapter.safetensors")
    with torch.no_grad():
        return root, base, backend.model(input_ids=IDS).logits


@pytest.mark.parametrize("source", ["run", "run/checkpoints/v00000005", "adapter.safetensors"])
def test_every_source_gives_the_same_peft_folder(
    trained: tuple[Path, Path, torch.Tensor], tmp_path: Path, source: str
) -> None:
    root, base, logits = trained
    line = export(root / source, tmp_path / "out", model=str(base) if source.endswith("safetensors") else "")
    assert str(base) in line
    scope: dict[str, object] = {}
    exec(f"import peft, transformers\n{line}", scope)
    with torch.no_grad():
        loaded = scope["model"](input_ids=IDS).logits  # type: ignore[operator]
    assert float((loaded - logits).abs().max()) <= 1e-6
    again = export(tmp_path / "out", tmp_path / "again")
    assert str(tmp_path / "again") in again
    assert (tmp_path / "again" / "adapter_config.json").read_text() == (
        tmp_path / "out" / "adapter_config.json"
    ).read_text()


def test_a_merged_model_gives_the_same_logits_without_peft(
    trained: tuple[Path, Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, logits = trained
    assert main([str(root / "run"), str(tmp_path / "whole"), "--merged"]) == 0
    assert "AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert not isinstance(model, PeftModel)
    with torch.no_grad():
        assert float((model(input_ids=IDS).logits - logits).abs().max()) <= 1e-5
    assert (tmp_path / "whole" / "tokenizer_config.json").is_file()


def test_what_cannot_be_exported_is_one_clear_message(
    trained: tuple[Path, Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, _ = trained
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(AsyncRLError, match="not an empty folder"):
        export(root / "run", tmp_path / "full")
    with pytest.raises(AsyncRLError, match="name it with --model"):
        export(root / "adapter.safetensors", tmp_path / "out")
    assert main([str(tmp_path / "full"), str(tmp_path / "out")]) == 1
    assert "neither checkpoints/ nor adapters/final/" in capsys.readouterr().err

"""What is exported of adapters on experts, loaded by peft on the fused model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from merged_adapters import merged_logits
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_lm import VOCABULARY, tiny_lm
from transformers import AutoModelForCausalLM

from async_rl.config import TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import canonical_config, policy_digest, tensor_name, write_adapter
from trainer.export import export
from trainer.lora import adapter_config, attach_lora, write_peft_folder
from trainer.merging import merge_adapter
from trainer.peft_layout import from_peft, module_of, shared_again, stacks
from trainer.targets import resolve_targets

MIXED = {"mlp_only_layers": [0]}
SHARED_EXPERTS = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
IDS = torch.arange(24).view(2, 12) % VOCABULARY
CASES: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("qwen3", {}, (), "each"),
    ("qwen3_moe", {}, (), "each"),
    ("qwen3_moe", {}, (), "shared_outer"),
    ("qwen3_moe", MIXED, (), "each"),
    ("qwen3_moe", MIXED, (), "shared_outer"),
    ("qwen3_moe", {}, ("q_proj", "v_proj"), "each"),
    ("qwen3_moe", {}, ("gate_proj", "up_proj"), "each"),
    ("qwen3_moe", {}, ("q_proj", "up_proj"), "each"),
    ("qwen3_moe", {}, ("down_proj",), "shared_outer"),
    ("qwen3_moe", MIXED, ("q_proj", "0.mlp.gate_proj"), "each"),
    ("glm4_moe", {}, (), "each"),
    ("glm4_moe", {}, ("gate_proj", "q_proj"), "shared_outer"),
    ("glm4_moe", {}, SHARED_EXPERTS, "each"),
    ("glm4_moe", {}, (*SHARED_EXPERTS, "q_proj"), "each"),
]
Made = tuple[Any, dict[str, torch.Tensor], dict[str, Any], torch.Tensor]


def made(kind: str, changes: dict[str, Any], targets: tuple[str, ...], layout: Any) -> Made:
    """The base model, a random adapter's tensors and config, and the logits that the trainer has with it."""
    model = tiny_lm(kind, **changes)
    trainer = TrainerConfig(rank=4, alpha=6, expert_adapters=layout)
    found = resolve_targets(model, targets)
    parameters = attach_lora(model, found, trainer, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        logits = model(input_ids=IDS).logits
    tensors = {name: parameter.detach() for name, parameter in parameters.items()}
    return tiny_lm(kind, **changes), tensors, adapter_config(found, trainer), logits


def each_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without anything shared: each expert's tensors under its own name."""
    apart = {name: tensor for name, tensor in tensors.items() if not module_of(name).path}
    for (path, projection), parts in stacks(tensors).items():
        for part, stack in parts.items():
            for expert, tensor in enumerate(stack.unbind()):
                apart[tensor_name(f"{path}.{expert}.{projection}", part)] = tensor
    return dict(sorted(apart.items()))


def close(found: torch.Tensor, wanted: torch.Tensor, share: float = 1e-5) -> None:
    assert float((found - wanted).abs().max()) <= share * float(wanted.abs().max())


@pytest.mark.parametrize(("kind", "changes", "targets", "layout"), CASES)
def test_peft_loads_it_to_the_same_logits_and_it_comes_back(
    tmp_path: Path, kind: str, changes: dict[str, Any], targets: tuple[str, ...], layout: str
) -> None:
    base, tensors, config, logits = made(kind, changes, targets, layout)
    close(merged_logits(base, tensors, 1.5, IDS).detach(), logits)
    write_peft_folder(tmp_path / "peft", tensors, config, "base")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    missing = [name for name, each in loaded.named_parameters() if "lora_B" in name and not each.any()]
    assert not missing
    with torch.no_grad():
        close(loaded(input_ids=IDS).logits, logits)
    table = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    again, back = from_peft(load_file(tmp_path / "peft" / "adapter_model.safetensors"), table)
    assert canonical_config(back) == canonical_config(config)
    assert policy_digest(again, back) == policy_digest(tensors, config)


@pytest.mark.parametrize("layout", ["each", "shared_outer"])
def test_each_experts_own_names_are_understood_by_peft_too(tmp_path: Path, layout: str) -> None:
    """As vLLM and SGLang have them: peft makes its own layout of them."""
    base, tensors, config, logits = made("qwen3_moe", {}, (), layout)
    apart = each_expert(tensors)
    assert {name for name in apart if ".experts." in name} == {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.lora_{part}.weight"
        for layer in range(2)
        for expert in range(4)
        for projection in ("gate", "up", "down")
        for part in "AB"
    }
    back = shared_again(apart)
    assert policy_digest(back, config) == policy_digest(tensors, config)
    write_peft_folder(tmp_path, tensors, config, "base")
    table = json.loads((tmp_path / "adapter_config.json").read_text())
    table |= {"target_modules": config["target_modules"], "target_parameters": None}
    table |= {"rank_pattern": {}, "alpha_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(table))
    save_file({name: each.contiguous().clone() for name, each in apart.items()}, tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    with torch.no_grad():
        close(loaded(input_ids=IDS).logits, logits)
    read, found = from_peft(load_file(tmp_path / "adapter_model.safetensors"), table)
    assert policy_digest(read, found) == policy_digest(tensors, config)


@pytest.mark.parametrize(("kind", "changes", "targets", "layout"), CASES)
def test_merged_it_is_the_same_model(kind: str, changes: dict[str, Any], targets: tuple[str, ...], layout: str) -> None:
    base, tensors, config, logits = made(kind, changes, targets, layout)
    merge_adapter(base, tensors, config)
    with torch.no_grad():
        close(base(input_ids=IDS).logits, logits)


def test_the_command_writes_both(tmp_path: Path) -> None:
    base, tensors, config, logits = made("qwen3_moe", {}, (), "each")
    base.save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "adapter.safetensors", tensors, config)
    export(tmp_path / "adapter.safetensors", tmp_path / "peft", model=str(tmp_path / "base"))
    export(tmp_path / "peft", tmp_path / "whole", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        close(model(input_ids=IDS).logits, logits)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("qwen3_moe", {"alpha_pattern": {}}, "alpha_pattern has no 'gate_up_proj'"),
        ("qwen3_moe", {"rank_pattern": {}}, "rank_pattern has no 'gate_up_proj'"),
        ("qwen3_moe", {"alpha_pattern": {"gate_up_proj": 6}}, "alpha_pattern says 6 for 'gate_up_proj'"),
        ("qwen3_moe", {"use_rslora": True}, "rank-stabilised"),
        ("qwen3", {"alpha_pattern": {"q_proj": 48}}, "alpha_pattern says 48 for 'q_proj'"),
        ("qwen3", {"rank_pattern": {"q_proj": 8}}, "rank_pattern says 8 for 'q_proj'"),
    ],
)
def test_a_rank_or_scale_of_its_own_is_refused(tmp_path: Path, kind: str, changes: dict[str, Any], said: str) -> None:
    base, tensors, config, _ = made(kind, {}, (), "each")
    base.save_pretrained(tmp_path / "base")
    write_peft_folder(tmp_path / "peft", tensors, config, str(tmp_path / "base"))
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(AsyncRLError, match=said):
        export(tmp_path / "peft", tmp_path / "whole", merged=True)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    base, tensors, config, _ = made("qwen3_moe", {}, (), "each")
    write_peft_folder(tmp_path, tensors, config, "base")
    table = json.loads((tmp_path / "adapter_config.json").read_text())
    mixed = load_file(tmp_path / "adapter_model.safetensors")
    mixed["base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"] += 1
    with pytest.raises(AsyncRLError, match="not one pair for gate and one for up"):
        from_peft(mixed, table)
    lacking = {name: each for name, each in tensors.items() if "experts.2.gate_proj.lora_A" not in name}
    with pytest.raises(AsyncRLError, match=r"layers.0.mlp.experts.gate_proj: lora_A is not there for each of 4"):
        merge_adapter(base, lacking, config)
    with pytest.raises(AsyncRLError, match="is no module of the model"):
        merge_adapter(tiny_lm("qwen3"), tensors, config)

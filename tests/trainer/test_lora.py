import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from async_rl.config import TrainerConfig
from trainer.lora import LoraError, attach_lora
from trainer.targets import TargetError, resolve_targets

LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def dense() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            vocab_size=11,
        )
    )


def mixture() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
            vocab_size=11,
        )
    )


class RoutedBlock(torch.nn.Module):
    """A mixture whose router is an nn.Linear, as in most models before transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 4)
        self.router = torch.nn.ModuleDict({"proj": torch.nn.Linear(16, 4)})
        self.proj = torch.nn.Linear(16, 16)


def test_default_targets_are_every_linear_layer_but_the_head() -> None:
    targets = resolve_targets(dense())
    assert targets.patterns == LINEAR
    assert len(targets.modules) == 14
    assert targets.notices == ()
    table = targets.table(4)
    assert "q_proj           2" in table
    assert table.splitlines()[-1].split() == ["total", "14", f"{targets.parameters(4):,}"]


def test_routers_are_left_out_unless_named_and_ambiguous_names_become_paths() -> None:
    model = dense()
    model.model.layers[0].mlp.block = RoutedBlock()
    path = "model.layers.0.mlp.block"
    targets = resolve_targets(model)
    assert {target.name for target in targets.modules if path in target.name} == {f"{path}.proj"}
    assert f"{path}.proj" in targets.patterns  # "proj" alone would match the router's too
    assert "q_proj" in targets.patterns
    attach_lora(model, targets, TrainerConfig(rank=2), seed=0)
    named = resolve_targets(model, ("gate",))
    assert [target.name for target in named.modules] == [f"{path}.gate"]


def test_the_table_counts_what_is_really_trained() -> None:
    model = dense()
    targets = resolve_targets(model, ("q_proj", "lm_head"))
    parameters = attach_lora(model, targets, TrainerConfig(rank=3), seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in trained} == {id(parameter) for parameter in parameters.values()}
    assert sum(parameter.numel() for parameter in trained) == targets.parameters(3)


def test_a_name_that_matches_nothing_is_an_error_that_lists_the_names_there_are() -> None:
    with pytest.raises(TargetError, match=r"'query' matches no module.*down_proj, gate_proj") as error:
        resolve_targets(dense(), ("q_proj", "query"))
    assert "q_proj" in str(error.value)
    with pytest.raises(TargetError, match=r"'embed_tokens' is a Embedding, not an nn.Linear"):
        resolve_targets(dense(), ("embed_tokens",))


def test_experts_in_another_layout_are_announced_and_refused_by_name() -> None:
    model = mixture()
    for layer in model.model.layers:
        layer.mlp.experts.is_transposed = True
    targets = resolve_targets(model)
    assert targets.patterns == ("k_proj", "o_proj", "q_proj", "v_proj")
    assert "the experts of 2 layers" in targets.notices[0]
    assert "is_transposed" in targets.notices[0]
    assert "notice: the experts of 2 layers" in targets.table(4)
    with pytest.raises(TargetError, match="only experts here"):
        resolve_targets(model, ("gate_up_proj",))
    attach_lora(model, targets, TrainerConfig(rank=2), seed=0)


def test_a_model_of_conv1d_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11, n_positions=16))
    with pytest.raises(TargetError, match=r"no nn.Linear to adapt.*Conv1D"):
        resolve_targets(model)


def test_a_comes_from_the_seed_alone_and_b_is_zero() -> None:
    def fresh(seed: int, disturb: int) -> dict[str, torch.Tensor]:
        model = dense()
        torch.manual_seed(disturb)
        parameters = attach_lora(model, resolve_targets(model), TrainerConfig(rank=4), seed)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    first, again, other = fresh(1, 10), fresh(1, 20), fresh(2, 10)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other[name])
            assert tensor.abs().max() <= tensor.shape[1] ** -0.5
            assert float(tensor.std()) == pytest.approx((3 * tensor.shape[1]) ** -0.5, rel=0.35)


def test_attaching_leaves_the_global_random_state_alone() -> None:
    model = dense()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    attach_lora(model, resolve_targets(model), TrainerConfig(rank=4), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fractional_alpha_is_refused() -> None:
    model = dense()
    with pytest.raises(LoraError, match=r"alpha = 1.5"):
        attach_lora(model, resolve_targets(model), TrainerConfig(alpha=1.5), seed=0)


def test_half_precision_bases_get_float32_adapters(tmp_path: Path) -> None:
    dense().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    parameters = attach_lora(model, resolve_targets(model), TrainerConfig(rank=2), seed=0)
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}

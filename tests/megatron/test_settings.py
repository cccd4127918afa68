"""What a model and a layout must be for the Megatron backend, and how layers are dealt to stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_models import MIXTURE, SIZES
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.schema import ConfigError
from trainer.megatron.layout import check_layout, padded_vocabulary, stage_layers
from trainer.megatron.settings import (
    read_config,
    shape_of,
    sparse_layers,
    transformer_config,
)


def mixture(**keys: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**(SIZES | MIXTURE | keys))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(), 'a llama model; .* backend = "megatron" is for qwen3 and qwen3_moe'),
        (Qwen3Config(use_sliding_window=True, sliding_window=8), "sliding_window = 8"),
        (Qwen3Config(attention_bias=True), "attention_bias = True"),
        (Qwen3Config(hidden_act="gelu"), "hidden_act = gelu"),
        (Qwen3Config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rope_parameters = "),
        (mixture(num_experts_per_tok=1), "num_experts_per_tok = 1"),
    ],
)
def test_a_model_that_is_not_computed_here_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(AsyncRLError, match=message):
        read_config(tmp_path)


def test_a_folder_without_a_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(AsyncRLError, match=f"{tmp_path}.*no model in Hugging Face layout"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (Qwen3Config(**SIZES), {"tensor": 4}, "tensor = 4 does not divide the model's 2 key and value heads"),
        (Qwen3Config(**(SIZES | {"intermediate_size": 51})), {"tensor": 2}, "does not divide the MLP's 51 columns"),
        (Qwen3Config(**SIZES), {"pipeline": 5}, "pipeline = 5 stages, but the model has 4 layers"),
        (Qwen3Config(**SIZES), {"data": 2, "expert": 2}, "does not divide the model's 1 experts"),
        (Qwen3Config(**SIZES), {"data": 2, "expert_tensor": 2}, "expert_tensor = 2, but the model has no experts"),
        (Qwen3Config(**(SIZES | {"vocab_size": 1})), {"tensor": 2}, "tensor = 2 ranks, but the model has 1 tokens"),
        (mixture(), {"tensor": 2}, "needs sequence = true"),
        (mixture(), {"data": 3, "expert": 3}, "expert = 3 does not divide the model's 8 experts"),
        (mixture(moe_intermediate_size=15), {"data": 2, "expert_tensor": 2}, "does not divide an expert's 15 columns"),
    ],
)
def test_a_layout_that_the_model_does_not_take_is_refused(config: Any, parallel: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[trainer.parallel\] .*{message}"):
        check_layout(shape_of(config), ParallelConfig(**parallel))


def test_layers_are_dealt_out_evenly_in_order() -> None:
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            dealt = [stage_layers(layers, stages, stage) for stage in range(stages)]
            assert [number for part in dealt for number in part] == list(range(layers))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_which_layers_have_experts_is_what_transformers_makes_of_the_configuration() -> None:
    from transformers import Qwen3MoeForCausalLM

    for keys in ({}, {"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}, {"decoder_sparse_step": 3}):
        config = mixture(**keys)
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config)
        assert sparse_layers(config) == [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert sparse_layers(Qwen3Config(**SIZES)) == [False] * 4


def test_numbers_are_handed_on_as_they_are() -> None:
    config = mixture(norm_topk_prob=True, rms_norm_eps=1e-5)
    parallel = ParallelConfig(tensor=2, sequence=True, expert=2)
    settings = transformer_config(config, parallel, torch.bfloat16)
    assert settings.layernorm_epsilon == 1e-5
    assert (settings.num_layers, settings.pipeline_model_parallel_size) == (4, 1)
    assert not settings.moe_router_pre_softmax
    assert transformer_config(mixture(norm_topk_prob=False), parallel, torch.bfloat16).moe_router_pre_softmax
    assert [padded_vocabulary(config.vocab_size, tensor) for tensor in (1, 2, 4)] == [67, 68, 68]

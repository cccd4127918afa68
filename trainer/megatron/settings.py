"""From a Hugging Face configuration to megatron-core's, for the models that are known here: Qwen3 and Qwen3-MoE.

What a configuration asks for and this backend does not compute is refused, never left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.routes import route_shape
from trainer.megatron.shape import ModelShape


def read_config(path: str | Path) -> Qwen3Config | Qwen3MoeConfig:
    """The configuration of a model's folder. Raises AsyncRLError for a model of another kind."""
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise AsyncRLError(f"[model] path = {str(path)!r}: no model in Hugging Face layout: {error}") from error
    if not isinstance(config, (Qwen3Config, Qwen3MoeConfig)):
        raise AsyncRLError(
            f'[model] path = {str(path)!r}: a {config.model_type} model; [trainer] backend = "megatron" is for qwen3 '
            'and qwen3_moe, others need backend = "torch"'
        )
    check_model(config)
    return config


def check_model(config: Any) -> None:
    """Raises AsyncRLError for what of a Qwen3 or Qwen3-MoE configuration is not computed here."""
    odd = {
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(config.attention_bias),
        "sliding_window": config.sliding_window is not None,
        "rope_parameters": config.rope_parameters.get("rope_type", "default") != "default",
        "num_experts_per_tok": is_mixture(config) and config.num_experts_per_tok < 2,
    }
    found = [f"{key} = {getattr(config, key)}" for key, wrong in odd.items() if wrong]
    if found:
        raise AsyncRLError(
            f'the model\'s config.json: {", ".join(found)}: not known to backend = "megatron"; use backend = "torch"'
        )


def shape_of(config: Any) -> ModelShape:
    """What the estimate and the checks that need no torch know of a model."""
    return msgspec.convert(config.to_dict(), ModelShape)


def is_mixture(config: Any) -> bool:
    return isinstance(config, Qwen3MoeConfig)


def sparse_layers(config: Any) -> list[bool]:
    """Which layers, from the first, have experts in place of an MLP."""
    shape = route_shape(config.to_dict()) if is_mixture(config) else None
    routed = shape.routed if shape else ()
    return [layer in routed for layer in range(config.num_hidden_layers)]


def transformer_config(config: Any, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's settings of a layer. No dropout and no initialisation, so nothing is drawn at random; nothing is
    fused by a compiler. The pipeline is ours (`passes`): to megatron-core there is one stage, whose layers carry the
    numbers that they have in the whole model."""
    mixture: dict[str, Any] = {}
    if is_mixture(config):
        mixture = {
            "num_moe_experts": config.num_experts,
            "moe_layer_freq": [int(sparse) for sparse in sparse_layers(config)],
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            # Softmax over all experts and then the k largest, or (the same as dividing those by their sum) over the k.
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": True,
            "expert_model_parallel_size": parallel.expert,
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=parallel.tensor,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **mixture,
    )


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

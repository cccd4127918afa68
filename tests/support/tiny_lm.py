"""Tiny random causal language models: of several families, with distributions far from uniform, or saved as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

VOCABULARY = 29
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
ROPE = COMMON | SIZES | {"num_key_value_heads": 2, "head_dim": 8}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": ROPE,
    "qwen3": ROPE,
    "llama": ROPE,
    "gpt_neox": COMMON | SIZES,
    "gpt2": COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3_moe": ROPE | EXPERTS,
    "glm4_moe": ROPE | EXPERTS | SHARED_EXPERT,
    "granite": ROPE | {"logits_scaling": 4.0},  # divides its logits
    "gemma2": ROPE,  # soft caps on scores and logits
    "gemma3_text": ROPE | {"sliding_window": 64},  # a window longer than any sequence of the tests
    "mistral": ROPE | {"sliding_window": 64},
    "mamba": COMMON | {"hidden_size": 32, "num_hidden_layers": 2},
    "qwen3_next": ROPE | EXPERTS | LINEAR_ATTENTION,
    "falcon": COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def tiny_lm(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of `kind` in eval mode, the same every time. Eager where scores are capped, as the trainer loads it."""
    torch.manual_seed(0)
    extra = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(CONFIGS[kind] | changes)), **extra)
    _spread(model, 0.25)
    return model.to(dtype).eval()


def save_qwen3(folder: Path, std: float | None = None, **sizes: Any) -> Path:
    """`folder`, with a random model in it, of untied embeddings unless `sizes` say so, the same every time; `std` of
    its matrices, by default the library's."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**({"tie_word_embeddings": False} | sizes)))
    if std is not None:
        _spread(model, std)
    model.save_pretrained(folder)
    return folder


def _spread(model: Any, std: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)

"""Models, batches and dense gradients for tests of the sketch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 19,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def dense_model(seed: int = 0, **sizes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes})).eval()


def expert_model(seed: int = 0, **sizes: Any) -> Qwen3MoeForCausalLM:
    """One layer of experts behind a dense one."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [0]}
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **experts, **sizes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:  # transformers leaves fused experts as they lie in memory
                parameter.normal_(std=0.1)
    return model


def some_tokens(rows: int = 4, length: int = 11, vocabulary: int = 19, seed: int = 1) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def some_loss(model: Any, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Any scalar that depends on all the tokens: a sum, so that micro-batches add up."""
    return torch.nn.functional.cross_entropy(
        model(input_ids=tokens, use_cache=False, **inputs).logits[:, :-1].flatten(0, 1).float(),
        tokens[:, 1:].flatten(),
        reduction="sum",
    )


def dense_gradients(model: Any, tokens: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
    """Of the same loss by autograd, by projection name: what must be sketched."""
    model.requires_grad_(True)
    found: dict[str, torch.Tensor] = {}
    gradients = torch.autograd.grad(some_loss(model, tokens, **inputs), list(model.parameters()), allow_unused=True)
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        if name.endswith("experts.gate_up_proj"):
            gate, up = gradient.chunk(2, dim=1)
            path = name.removesuffix("gate_up_proj")
            found |= {f"{path}gate_proj": gate, f"{path}up_proj": up}
        else:
            found[name.removesuffix(".weight")] = gradient
    return found

"""Tiny random mixture-of-experts models, and transformers' own forward under forced routes as the oracle of replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, LAYERS, EXPERTS, EACH = 29, 3, 6, 2
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "num_experts_per_tok": EACH, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    # The first layer is dense, so routes that are counted from the first router are shifted by one.
    "qwen3_moe": {"num_experts": EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True},
    "olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def moe_model(kind: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    """The same at each call."""
    config = AutoConfig.for_model(kind, **(COMMON | KINDS[kind] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # experts that differ, and distributions that are not uniform
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model.eval()


def routers(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """By the number of their decoder layer."""
    layers = model.base_model.layers
    return {number: layer.mlp.gate for number, layer in enumerate(layers) if hasattr(layer.mlp, "gate")}


def random_routes(lengths: Sequence[int], routed: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """int16 [n, LAYERS, EACH] of each sequence: any experts, never one twice."""
    random = np.random.default_rng(seed)
    out = []
    for length in lengths:
        routes = np.full((length, LAYERS, EACH), -1, np.int16)
        routes[:, list(routed)] = random.random((length, len(routed), EXPERTS)).argsort(-1)[..., :EACH]
        out.append(routes)
    return out


@contextmanager
def forced(model: PreTrainedModel, routes: np.ndarray) -> Iterator[None]:
    """Within, every router of Qwen3-MoE sends the n tokens of one sequence where `routes` [n, layers, k] says: the
    formula of R3, with masks in place of gathers."""
    before: dict[torch.nn.Module, Callable[..., Any]] = {}

    def forward_of(gate: torch.nn.Module, layer: int) -> Callable[..., Any]:
        def forward(hidden: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            chosen = torch.from_numpy(routes[:, layer].astype(np.int64))
            live = logits.topk(EACH, dim=-1)[1]
            chosen = torch.where((chosen < 0).any(1, keepdim=True), live, chosen)
            mask = torch.zeros_like(logits).scatter(1, chosen, 1.0)
            gates = mask * logits.exp() / (mask * logits.exp()).sum(1, keepdim=True)
            return logits, gates.gather(1, chosen), chosen

        return forward

    for layer, gate in routers(model).items():
        before[gate] = gate.forward
        gate.forward = forward_of(gate, layer)
    try:
        yield
    finally:
        for gate, forward in before.items():
            gate.forward = forward


def logprobs(model: PreTrainedModel, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """[n - 1] of one sequence, entry t for token t + 1."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def live_routes(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """int64 [n, LAYERS, EACH] of one sequence, -1 in dense layers: what transformers itself chooses."""
    seen: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Callable[..., None]:
        return lambda module, args, out: seen.update({layer: out[2]})

    handles = [gate.register_forward_hook(note(layer)) for layer, gate in routers(model).items()]
    try:
        model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    out = np.full((len(tokens), LAYERS, EACH), -1, np.int64)
    for layer, chosen in seen.items():
        out[:, layer] = chosen.numpy()
    return out

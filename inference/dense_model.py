"""Recognising a model of Llama's family, and its weights under each policy as inference.dense_decoder wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from inference.dense_decoder import DenseShape, DenseWeights, LayerWeights
from inference.slot_linear import JointWeights, MergedLinear, SlotLinear, SlotTensors

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Rotations that depend on a token's position alone, not on how long its sequence has become.
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


def why_not_dense(config: PreTrainedConfig) -> str | None:
    """Why a model is none of the family, or None when it is one."""
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILY:
        return f"model type {config.model_type} is not one of {', '.join(sorted(FAMILY))}"
    if rotation not in FIXED_ROTATIONS:
        return f"rotary embedding of type {rotation!r} changes with the length of the sequence"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    return None


class DenseModel:
    """The weights of each policy slot: the tensors of the model itself, whose layers with one input become joint."""

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self.shape = DenseShape(
            config.num_attention_heads,
            config.num_key_value_heads,
            self._decoder.layers[0].self_attn.head_dim,
            config.rms_norm_eps,
            tuple(kwargs.get("sliding_window") for kwargs in get_layer_types_and_kwargs(config)[1]),
        )
        for layer in self._decoder.layers:
            for parts in _same_input(layer):
                merged = [part for part in parts if isinstance(part, MergedLinear)]
                if merged:
                    JointWeights(merged)
        self._made: dict[int, DenseWeights] = {}

    def weights(self, slot: int) -> DenseWeights:
        """Those of a slot; the same object until the slot changes."""
        if slot not in self._made:
            self._made[slot] = DenseWeights(
                self._decoder.embed_tokens.weight,
                tuple(self._layer(layer, slot) for layer in self._decoder.layers),
                self._decoder.norm.weight,
                self._head.in_slot(slot),
            )
        return self._made[slot]

    def changed(self, slot: int) -> None:
        """The slot was loaded: what was made of it holds no longer."""
        self._made.pop(slot, None)

    def rotation(self, positions: int) -> torch.Tensor:
        """See dense_decoder.decode_rows: [positions, 2, d], from the model's own module."""
        like = self._decoder.embed_tokens.weight
        cosine, sine = self._decoder.rotary_emb(like, torch.arange(positions, device=like.device)[None])
        first, second = sine[0].chunk(2, -1)
        return torch.stack((cosine[0], torch.cat((-first, second), -1)), 1)

    def _layer(self, layer: Any, slot: int) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, gate_up = (_projections(parts, slot) for parts in _same_input(layer))
        return LayerWeights(
            layer.input_layernorm.weight,
            qkv,
            self._qk_norm(attention),
            attention.o_proj.in_slot(slot),
            layer.post_attention_layernorm.weight,
            gate_up,
            mlp.down_proj.in_slot(slot),
        )

    def _qk_norm(self, attention: Any) -> torch.Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        norms = ((attention.q_norm, self.shape.heads), (attention.k_norm, self.shape.kv_heads))
        return torch.cat([norm.weight.expand(heads, -1) for norm, heads in norms])


def _same_input(layer: Any) -> tuple[list[SlotLinear], list[SlotLinear]]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def _projections(layers: Sequence[SlotLinear], slot: int) -> tuple[SlotTensors, ...]:
    """One joint projection where the weights are merged, else one for each layer."""
    first = layers[0]
    if not isinstance(first, MergedLinear):
        return tuple(layer.in_slot(slot) for layer in layers)
    biases = tuple(layer.bias for layer in layers if layer.bias is not None)
    return (SlotTensors(first.joint.matrices[slot], torch.cat(biases) if biases else None, None, None),)

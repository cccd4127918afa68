"""The models of `async-rl bench train`: shapes, with random weights made where they are needed, and the batch of each.

The large ones have the dimensions of models that people train: Qwen2.5-1.5B and -7B, and of Gemma 3 27B in Qwen3's
architecture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from async_rl.config import TinyModelConfig
from trainer.tiny_model import CHARACTERS, SPECIAL


class Shape(NamedTuple):
    """A model, and a batch of `attempts` sequences of `tokens` tokens; `checkpointed`: with activation checkpointing.
    `controlled`: steps are controlled in an arm of their own."""

    config: PretrainedConfig
    attempts: int
    tokens: int
    checkpointed: bool = False
    controlled: bool = True

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)


def _small(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def _quickstart() -> Qwen3Config:
    """As trainer.tiny_model makes it."""
    tiny = TinyModelConfig()
    vocabulary = len(SPECIAL) + len(CHARACTERS)
    return _small(tiny.hidden, tiny.layers, tiny.heads, tiny.kv_heads, tiny.intermediate, vocabulary)


SHAPES = {
    "tiny": Shape(_small(64, 2, 4, 2, 128, 100), attempts=4, tokens=16, checkpointed=True),
    "quickstart": Shape(_quickstart(), attempts=256, tokens=20),
    "512x4": Shape(_small(512, 4, 8, 4, 1536, 2048), attempts=16, tokens=128),
    "1.5b": Shape(
        Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        attempts=4,
        tokens=2048,
        checkpointed=True,
    ),
    "7b": Shape(
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
        attempts=4,
        tokens=2048,
        checkpointed=True,
    ),
    "27b": Shape(
        Qwen3Config(
            vocab_size=262208,
            hidden_size=5376,
            intermediate_size=21504,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        attempts=4,
        tokens=2048,
        checkpointed=True,
        controlled=False,  # what control costs the 7b says in less time
    ),
}
"""By name. "tiny" is there to try the command."""


def make_model(shape: Shape, dtype: str, device: torch.device) -> PreTrainedModel:
    """Random weights, made in `dtype` (torch's name) on `device`: no checkpoint, and no second copy."""
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config, dtype=getattr(torch, dtype))
    return model


def weight_bytes(shape: Shape, dtype: str) -> int:
    """Of all its parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in make_model(shape, dtype, torch.device("meta")).parameters())

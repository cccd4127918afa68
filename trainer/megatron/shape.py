"""What a model's config.json says about the sizes of its matrices: all that the memory estimate needs of a model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from async_rl.config import CONFIGS, ConfigError, ModelConfig, TinyModelConfig
from async_rl.schema import PositiveInt

SHAPES = CONFIGS / "shapes"
KINDS = ("qwen3", "qwen3_moe")
TINY_VOCABULARY = 100  # of trainer.tiny_model, which needs torch


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, rename={"head_size": "head_dim"}):
    """Fields of a Hugging Face config.json of Qwen3 or Qwen3-MoE, under its own names; a dense model has none of those
    for experts."""

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_size: int | None = None
    """`head_dim` in the file; without it the width is divided among the heads."""
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_local_experts: int = 0
    """transformers 5 writes the number of experts under this name, earlier ones under the other."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = ()

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def experts(self) -> int:
        return self.num_experts or self.num_local_experts

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Also that of the values."""
        return self.num_key_value_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this number, counted from 0, is a mixture of experts."""
        dense = layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step != 0
        return self.experts > 0 and not dense

    @property
    def parameters(self) -> int:
        """Of the whole model; tied embeddings are counted once."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_hidden_layers))
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return vocabulary + layers + self.hidden_size

    def layer_parameters(self, layer: int) -> int:
        """Of one layer: q, k, v and o, their norms, and the MLP or the router with all experts."""
        width = self.hidden_size
        attention = 2 * width * (self.query_width + self.key_width) + 2 * self.head_dim
        if self.has_experts(layer):
            mlp = self.experts * (width + 3 * width * self.moe_intermediate_size)
        else:
            mlp = 3 * width * self.intermediate_size
        return attention + mlp + 2 * width


def read_shape(model: ModelConfig) -> tuple[ModelShape, Path]:
    """That of [model]: of the folder `path` where there is one, else the shipped one that `shape` names; and the file
    that it was read from. Raises ConfigError where there is neither, and for a model of another architecture."""
    file = Path(model.path) / "config.json"
    if not (model.path and file.is_file()):
        if not model.shape:
            raise ConfigError(
                f"[model] path = {model.path!r} has no config.json, so nothing says how large the model is: give its "
                f"folder, or a shape that is shipped: shape = {' or '.join(map(repr, shipped_shapes()))}"
            )
        file = shipped_shapes().get(model.shape, SHAPES / f"{model.shape}.json")
    return shape_in(file), file


def tiny_shape(tiny: TinyModelConfig) -> ModelShape:
    """Of the model that [model.tiny] makes."""
    return ModelShape(
        model_type="qwen3_moe" if tiny.experts else "qwen3",
        vocab_size=TINY_VOCABULARY,
        hidden_size=tiny.hidden,
        intermediate_size=tiny.intermediate,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        num_experts=tiny.experts,
        num_experts_per_tok=tiny.experts_per_token if tiny.experts else 0,
        moe_intermediate_size=tiny.expert_intermediate if tiny.experts else 0,
    )


def shape_in(file: Path) -> ModelShape:
    """Of one config.json. Raises ConfigError."""
    try:
        shape = msgspec.json.decode(file.read_bytes(), type=ModelShape)
    except OSError as error:
        known = ", ".join(shipped_shapes())
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; shapes that are shipped: {known}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: it is not a config.json of Qwen3 or Qwen3-MoE: {error}") from error
    if shape.model_type not in KINDS:
        raise ConfigError(
            f"{file}: model_type = {shape.model_type!r}: the Megatron backend has {' and '.join(KINDS)}: take one of "
            'those, or [trainer] backend = "torch"'
        )
    return shape


def shipped_shapes() -> dict[str, Path]:
    """Files of configs/shapes, by name."""
    return {path.stem: path for path in sorted(SHAPES.glob("*.json"))}

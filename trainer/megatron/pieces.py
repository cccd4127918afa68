"""Which part of which Hugging Face tensor lies where in this rank's parameters.

megatron-core stores q, k and v of attention in one matrix, group by group (the queries of a group, its key, its value),
and gate and up of an MLP below one another; tensor ranks hold rows of those and columns of the matrices behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainer.megatron.settings import head_size, sparse_layers

if TYPE_CHECKING:
    from trainer.megatron.model import ShardedModel


class Piece(NamedTuple):
    """The rectangle of the Hugging Face tensor `name` (of `shape`) from `start` on, `size` in each dimension, and
    `local`, a view of the parameter that holds it here: of other dimensions perhaps, with the elements in one order.
    `owned`: of the ranks that hold this rectangle, this is the one that speaks for it."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local: torch.Tensor
    owned: bool

    @property
    def size(self) -> tuple[int, ...]:
        """Rows and columns of the rectangle (of a vector, its length)."""
        if len(self.shape) == 1:
            return (self.local.numel(),)
        columns = self.local.shape[-1]
        return (self.local.numel() // columns, columns)


def pieces(model: ShardedModel) -> Iterator[Piece]:
    """Every parameter of this rank, in the order of `tensor_names`."""
    stage, config, pg = model.stage, model.config, model.groups
    rank, first_copy = pg.tp.rank(), pg.dp.rank() == 0
    vocabulary = (config.vocab_size, config.hidden_size)
    if stage.first:
        yield _vocabulary("model.embed_tokens.weight", vocabulary, stage.embedding.weight, rank, first_copy)
    for number, layer in model.named_layers():
        yield from _layer(model, f"model.layers.{number}.", layer)
    if stage.last:
        yield _whole("model.norm.weight", stage.final_norm.weight.data, first_copy and rank == 0)
        if not config.tie_word_embeddings:
            yield _vocabulary("lm_head.weight", vocabulary, stage.head_weight, rank, first_copy)
        elif not stage.first:  # a copy of the embedding, which the first stage speaks for
            yield _vocabulary("model.embed_tokens.weight", vocabulary, stage.head_weight, rank, False)


def _layer(model: ShardedModel, prefix: str, layer: Any) -> Iterator[Piece]:
    config, pg = model.config, model.groups
    rank, first_copy = pg.tp.rank(), pg.dp.rank() == 0
    attention = layer.self_attention
    one = first_copy and rank == 0
    yield _whole(f"{prefix}input_layernorm.weight", layer.input_layernorm.weight.data, one)
    yield _whole(f"{prefix}post_attention_layernorm.weight", layer.pre_mlp_layernorm.weight.data, one)
    yield _whole(f"{prefix}self_attn.q_norm.weight", attention.q_layernorm.weight.data, one)
    yield _whole(f"{prefix}self_attn.k_norm.weight", attention.k_layernorm.weight.data, one)
    for name, local, rows in qkv_views(config, attention.linear_qkv.weight.data):
        start = rank * local.numel() // local.shape[-1]
        yield Piece(f"{prefix}self_attn.{name}.weight", (rows, config.hidden_size), (start, 0), local, first_copy)
    yield _columns(f"{prefix}self_attn.o_proj.weight", attention.linear_proj.weight.data, pg.tp, first_copy)
    if not layer.is_moe_layer:
        yield from _mlp(f"{prefix}mlp.", layer.mlp, pg.tp, first_copy)
        return
    router = layer.mlp.router.weight.data
    yield _whole(f"{prefix}mlp.gate.weight", router, one)
    for expert, mlp in zip(layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", mlp, pg.expt_tp, pg.expt_dp.rank() == 0)


def qkv_views(config: Any, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Of linear_qkv's rows on a rank (of its weight, or of anything with as many rows): those of q_proj, k_proj and
    v_proj as views [groups, heads of a group, head size, …], and how many rows each has on all ranks."""
    each = config.num_attention_heads // config.num_key_value_heads
    size = head_size(config)
    grouped = weight.view(-1, each + 2, size, *weight.shape[1:])
    yield "q_proj", grouped[:, :each], config.num_attention_heads * size
    yield "k_proj", grouped[:, each : each + 1], config.num_key_value_heads * size
    yield "v_proj", grouped[:, each + 1 :], config.num_key_value_heads * size


def _mlp(prefix: str, mlp: Any, group: Any, owned: bool) -> Iterator[Piece]:
    fc1 = mlp.linear_fc1.weight.data
    rows, width = fc1.shape[0] // 2, fc1.shape[1]
    for name, local in zip(("gate_proj", "up_proj"), fc1.view(2, rows, width), strict=True):
        shape, start = (rows * group.size(), width), (rows * group.rank(), 0)
        yield Piece(f"{prefix}{name}.weight", shape, start, local, owned)
    yield _columns(f"{prefix}down_proj.weight", mlp.linear_fc2.weight.data, group, owned)


def _columns(name: str, local: torch.Tensor, group: Any, owned: bool) -> Piece:
    rows, columns = local.shape
    return Piece(name, (rows, columns * group.size()), (0, columns * group.rank()), local, owned)


def _whole(name: str, local: torch.Tensor, owned: bool) -> Piece:
    return Piece(name, tuple(local.shape), (0,) * local.dim(), local, owned)


def _vocabulary(name: str, shape: tuple[int, int], weight: nn.Parameter, rank: int, owned: bool) -> Piece:
    """Rows of the vocabulary: the last ranks may have less than there is room for, or none."""
    room = weight.shape[0]
    first = min(rank * room, shape[0])
    rows = min(room, shape[0] - first)
    return Piece(name, shape, (first, 0), weight.data[:rows], owned)


def tensor_names(config: Any) -> list[str]:
    """Every tensor of the whole model by its Hugging Face name, experts one by one."""
    names = ["model.embed_tokens.weight"]
    for number, sparse in enumerate(sparse_layers(config)):
        prefix = f"model.layers.{number}."
        names += [f"{prefix}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        names += [f"{prefix}self_attn.{part}.weight" for part in ("q_norm", "k_norm", *_ATTENTION)]
        if sparse:
            names.append(f"{prefix}mlp.gate.weight")
        mlps = [f"mlp.experts.{expert}." for expert in range(config.num_experts)] if sparse else ["mlp."]
        names += [f"{prefix}{mlp}{part}.weight" for mlp in mlps for part in _MLP]
    return [*names, "model.norm.weight", *([] if config.tie_word_embeddings else ["lm_head.weight"])]


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

"""A Qwen3 or Qwen3-MoE model of megatron-core's layers, of which each rank holds its part.

A rank has one pipeline stage: embedding (the first), some decoder layers, final norm and head (the last). Layers are
megatron-core's own, with our attention and norm; what stands around them (rotary positions, recomputation, the head) is
ours, so that sequences can be packed and logits need not be gathered. Every parameter is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from async_rl.parallel_config import ParallelConfig
from trainer.logprobs import Rows
from trainer.megatron import groups, hf_weights, replay
from trainer.megatron.attention import Norm, PackedAttention, Packing, rotary_angles
from trainer.megatron.layout import check_layout, padded_vocabulary, stage_layers
from trainer.megatron.settings import (
    head_size,
    read_config,
    shape_of,
    sparse_layers,
    transformer_config,
)


class Inputs(NamedTuple):
    """What a stage's layers need of a micro-batch beside hidden states: ids int64 [1, tokens], padded to a multiple of
    the tensor ranks under `sequence`; angles [tokens, 1, 1, head size] of the rotary positions; the packing; where
    routers are served."""

    ids: torch.Tensor
    angles: torch.Tensor
    packing: Packing
    served: replay.Served | None


class Stage(MegatronModule):
    """The part of the model that a rank holds. `numbers` are its layers' places in the whole model, from 0."""

    def __init__(
        self, hf: Any, settings: TransformerConfig, numbers: range, pg: ProcessGroupCollection, recompute: bool
    ) -> None:
        super().__init__(settings)
        self.hf = hf
        self.numbers = numbers
        self.tensor = pg.tp
        self.first, self.last = numbers.start == 0, numbers.stop == hf.num_hidden_layers
        vocabulary = padded_vocabulary(hf.vocab_size, settings.tensor_model_parallel_size)
        if self.first:
            self.embedding = VocabParallelEmbedding(
                vocabulary,
                hf.hidden_size,
                init_method=lambda weight: None,
                reduce_scatter_embeddings=settings.sequence_parallel,
                config=settings,
                tp_group=pg.tp,
            )
        sparse = sparse_layers(hf)
        layers = (
            build_module(
                _layer_spec(hf, sparse[number]),
                config=settings,
                layer_number=number + 1,
                add_layer_offset=False,
                pg_collection=pg,
            )
            for number in numbers
        )
        self.decoder = Decoder(layers, recompute)
        replay.attach(zip(numbers, self.decoder.layers, strict=True))
        if self.last:
            self.final_norm = Norm(settings, hf.hidden_size, hf.rms_norm_eps)
            if not (self.first and hf.tie_word_embeddings):
                shape = vocabulary // settings.tensor_model_parallel_size, hf.hidden_size
                device = torch.cuda.current_device()
                self.head = nn.Parameter(torch.empty(shape, dtype=settings.params_dtype, device=device))

    @property
    def head_weight(self) -> torch.Tensor:
        """The rows of the output head that this rank of the last stage holds: [padded vocabulary / tensor, width]."""
        return self.head if "head" in self._parameters else self.embedding.weight

    def inputs(self, rows: Rows, trace: replay.Trace | None = None) -> Inputs:
        """Tokens go where `rows.routes` says, and a `trace` is told where they went. Raises ValueError for a
        micro-batch whose sequences are not packed."""
        if rows.layout is None or rows.position_ids is None:
            raise ValueError("micro-batches of the Megatron backend are packed rows")
        ids, positions = rows.ids, rows.position_ids[0]
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        padding = -ids.shape[1] % ranks
        if padding:
            ids, positions = (nn.functional.pad(tensor, (0, padding)) for tensor in (ids, positions))
        angles = rotary_angles(positions, head_size(self.hf), self.hf.rope_parameters["rope_theta"])
        return Inputs(ids, angles, Packing(layout=rows.layout), self._served(rows, ids.shape[1], trace))

    def _served(self, rows: Rows, tokens: int, trace: replay.Trace | None) -> replay.Served | None:
        """`tokens` is how many there are with padding."""
        if rows.routes is None and trace is None:
            return None
        routes = rows.routes
        if routes is not None:
            if len(routes) != rows.ids.shape[1]:
                raise ValueError(f"routes of {len(routes)} tokens for a micro-batch of {rows.ids.shape[1]}")
            split = self.config.sequence_parallel
            rank, ranks = (self.tensor.rank(), self.tensor.size()) if split else (0, 1)
            routes = replay.on_this_rank(routes, tokens, rank, ranks)
        served = replay.Served(routes, rows.ids.shape[1], traced=trace is not None)
        if trace is not None:
            trace.served.append(served)
        return served

    def forward(self, hidden: torch.Tensor | None, inputs: Inputs) -> torch.Tensor:
        """[tokens, 1, width], of the tokens that lie on this rank (all, or under `sequence` its part), from those that
        the stage before sent (None in the first stage, which has the ids)."""
        if self.first:
            hidden = self.embedding(inputs.ids)
            if not self.config.sequence_parallel:
                hidden = hidden.transpose(0, 1).contiguous()
        hidden = self.decoder(hidden, inputs)
        return self.final_norm(hidden) if self.last else hidden


class Decoder(nn.Module):
    """The layers of a stage, one after the other (`decoder.layers` is what megatron-core calls them too)."""

    def __init__(self, layers: Iterable[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                # To the end: a rank that stopped early would not take part in the collectives that come after.
                with set_checkpoint_early_stop(False):
                    hidden = checkpoint(_computed, layer, hidden, inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _computed(layer, hidden, inputs)
        return hidden


def _computed(layer: nn.Module, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """One layer: the only place from which it is called, in the forward pass and when it is computed again."""
    with replay.serving(layer, inputs.served):
        out: torch.Tensor = layer(
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=inputs.angles, packed_seq_params=inputs.packing
        )[0]
    # megatron-core's dispatcher keeps its last weights of experts, and those all of the graph that led to them: with
    # recomputation every layer's activations would stay until its next forward pass.
    if (dispatcher := getattr(layer.mlp, "token_dispatcher", None)) is not None:
        dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None
    return out


def _layer_spec(hf: Any, sparse: bool) -> ModuleSpec:
    """megatron-core's layer with our attention and norm in it."""
    spec = get_gpt_layer_local_spec(
        num_experts=hf.num_experts if sparse else None, qk_layernorm=True, normalization="RMSNorm"
    )
    submodules: Any = spec.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = Norm
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = Norm
    return spec


@dataclass
class ShardedModel:
    """A rank's part of a model, and how the whole is divided."""

    chunks: list[Stage]
    config: Any
    """The Hugging Face configuration."""
    parallel: ParallelConfig
    groups: ProcessGroupCollection
    device: torch.device

    @property
    def stage(self) -> Stage:
        return self.chunks[0]

    def named_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """This rank's layers, each with its number in the whole model."""
        yield from zip(self.stage.numbers, self.stage.decoder.layers, strict=True)


def build(
    path: str | Path, parallel: ParallelConfig, *, dtype: torch.dtype, device: torch.device, recompute: bool
) -> ShardedModel:
    """This rank's part of the model in a folder in Hugging Face layout, with its weights, frozen; `groups.begin` was
    called. With `recompute` a layer keeps only its input and is computed again in the backward pass. Raises
    AsyncRLError."""
    hf = read_config(path)
    check_layout(shape_of(hf), parallel)
    pg = groups.current()
    numbers = stage_layers(hf.num_hidden_layers, parallel.pipeline, pg.pp.rank())
    stage = Stage(hf, transformer_config(hf, parallel, dtype), numbers, pg, recompute).eval()
    model = ShardedModel([stage], hf, parallel, pg, device)
    stage.requires_grad_(False)
    hf_weights.load(model, path)
    return model

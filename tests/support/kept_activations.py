"""What layers of the Megatron model keep for their backward pass, counted on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sharded_models import CPU, make_model

from async_rl.config import TrainerConfig
from async_rl.parallel_config import ParallelConfig
from trainer.logprobs import packed_rows

TOKENS = 600  # one sequence, longer than those that attention computes in blocks
RANK = 3


def count(payload: list[dict[str, Any]]) -> list[list[int]]:
    """For each case (path, parallel, dtype): bytes that each layer's operations save on this rank, of tensors that are
    no parameters, a storage once."""
    return [_case(**case) for case in payload]


def _case(path: str, parallel: dict[str, Any], dtype: str) -> list[int]:
    from trainer.megatron import groups
    from trainer.megatron.learnable import LoraShards
    from trainer.megatron.model import _computed, build

    sizes = ParallelConfig(**parallel)
    groups.begin(sizes, CPU)
    try:
        model = build(path, sizes, dtype=getattr(torch, dtype), device=CPU, recompute=False)
        learnable = LoraShards(model, TrainerConfig(backend="megatron", parallel=sizes, rank=RANK), 0, path)
        own = {each.untyped_storage().data_ptr() for each in model.stage.parameters()}
        own |= {each.untyped_storage().data_ptr() for each in learnable.parameters.values()}
        inputs = model.stage.inputs(_rows(model.config))
        hidden = model.stage.embedding(inputs.ids)
        hidden = hidden if sizes.sequence else hidden.transpose(0, 1).contiguous()
        out = []
        for _, layer in model.named_layers():
            found: dict[int, torch.Tensor] = {}

            def pack(tensor: torch.Tensor, found: dict[int, torch.Tensor] = found) -> torch.Tensor:
                if tensor.untyped_storage().data_ptr() not in own:
                    found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                hidden = _computed(layer, hidden, inputs)
            out.append(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))
        return out
    finally:
        groups.end()


def _rows(config: Any) -> Any:
    tokens = np.arange(TOKENS + 1, dtype=np.int32) % config.vocab_size
    routes: Any = ()
    if (experts := getattr(config, "num_experts", 0)) > 0:
        each, layers = config.num_experts_per_tok, config.num_hidden_layers
        turn = np.arange(TOKENS + 1)[:, None, None] * each + np.arange(layers)[:, None] + np.arange(each)
        routes = [(turn % experts).astype(np.int16)]  # as many tokens to each expert as to any other
    return packed_rows([tokens], [np.arange(1, TOKENS + 1)], CPU, routes)


def model_of(kind: str, folder: Path) -> Path:
    return make_model(kind, folder / kind)

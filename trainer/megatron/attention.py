"""What megatron-core's layers take from us: attention over packed sequences, and a norm.

megatron-core's own attention refuses packed rows without NVIDIA's Transformer Engine, and its own norm refuses to be
computed on a part of the tokens (`sequence`). Both run on CPUs and GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from trainer.packed_attention import Layout, packed_attention

EMPTY = Layout(())


@dataclass
class Packing(PackedSeqParams):
    """How the tokens of a row are divided into sequences, handed through megatron-core's layers to `PackedAttention`.
    Tokens behind the last sequence are padding. (Its own fields stay empty: with them its layers would change the
    shapes of what they hand on, and place rotary positions themselves.)"""

    layout: Layout = EMPTY


class PackedAttention(nn.Module):
    """Causal attention of each sequence of a row to itself, on the heads of this rank. Not a parameter in it."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_options: Any
    ) -> None:
        super().__init__()
        self.num_key_value_groups = config.num_attention_heads // config.num_query_groups

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Packing,
        **_options: Any,
    ) -> torch.Tensor:
        """query [tokens, 1, heads, d], key and value [tokens, 1, key heads, d] → [tokens, 1, heads · d]; 0 for padding
        behind the last sequence."""
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out, _ = packed_attention(self, *heads_first, None, layout=packed_seq_params.layout)
        out = out[0].flatten(1)[:, None]
        padding = len(query) - len(out)
        return nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


class Norm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 up to the weight, as Qwen3 has it. Under
    `sequence` each tensor rank has other tokens, so a gradient of the weight is a part of the whole one."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(values.dtype)


def rotary_angles(position_ids: torch.Tensor, size: int, base: float) -> torch.Tensor:
    """The angles by which each position turns a head's pairs, as megatron-core takes them: float32
    [tokens, 1, 1, size], of position_ids int64 [tokens]; positions may begin anew anywhere."""
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, device=position_ids.device).float() / size)
    angles = position_ids.float()[:, None] * frequencies
    return torch.cat((angles, angles), dim=-1)[:, None, None]

"""The forward of Llama's family (Llama, Mistral, Qwen 2, Qwen 3) in as few kernels as it takes, as plain functions.

transformers' own forward of a small model spends most of its time between the kernels. Here projections of the same
input are one product, queries and keys are normalised and rotated together, and a new key goes straight to its place
in the KV rows. Every tensor is an argument and nothing is remembered, so the same function can be compiled once and
be called with the weights of any policy.

Suffixes of shapes: n rows, b sequences, t positions of a sequence, l positions of the cache that are read, h heads,
k key-value heads, g heads per key-value head, d head dimension, m hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention, silu

from inference.slot_linear import SlotTensors, low_rank_linear

# Given the layer's number, queries [..., h, d], keys and values [..., k, d]: the attention's result [..., h * d].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DenseShape(NamedTuple):
    """What no tensor says. `windows` has, for each layer, how many positions it sees (None: all)."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]


class LayerWeights(NamedTuple):
    """`qkv` and `gate_up` are one joint projection each, or one for each of their parts. `qk_norm` [h + k, d] is the
    norm's weight for every head of the queries and the keys."""

    attention_norm: torch.Tensor
    qkv: tuple[SlotTensors, ...]
    qk_norm: torch.Tensor | None
    out: SlotTensors
    mlp_norm: torch.Tensor
    gate_up: tuple[SlotTensors, ...]
    down: SlotTensors


class DenseWeights(NamedTuple):
    """embedding [vocabulary, m]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: SlotTensors


def decode_rows(
    shape: DenseShape,
    weights: DenseWeights,
    rotation: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    ids_n: torch.Tensor,
    positions_n: torch.Tensor,
    seen_l: torch.Tensor,
) -> torch.Tensor:
    """Logits [n, v] after token ids_n[i] at positions_n[i] of row i, whose key and value are written to their places.
    `keys` and `values` are each layer's n rows, contiguous [n, k, positions, d]; of them positions seen_l = 0..l-1 are
    read, l being the largest of positions_n plus one. rotation [positions, 2, d]: the cosines, and the sines with their
    first half negated, so that rotating is x · cosine + roll(x, d/2) · sine."""
    n, length, kv, dim = ids_n.shape[0], seen_l.shape[0], shape.kv_heads, shape.head_dim
    biases = {
        window: _bias(seen_l, positions_n[:, None, None, None], window, keys[0].dtype)
        for window in dict.fromkeys(shape.windows)
    }
    numbers = torch.arange(n, device=ids_n.device)
    places = numbers[:, None], torch.arange(kv, device=ids_n.device), positions_n[:, None]

    def attend(layer: int, q_nhd: torch.Tensor, k_nkd: torch.Tensor, v_nkd: torch.Tensor) -> torch.Tensor:
        keys[layer].index_put_(places, k_nkd)
        values[layer].index_put_(places, v_nkd)
        q_nkgd = q_nhd.reshape(n, kv, -1, dim)
        seen_k, seen_v = keys[layer][:, :, :length], values[layer][:, :, :length]
        return _attend_seen(q_nkgd, seen_k, seen_v, biases[shape.windows[layer]]).reshape(n, -1)

    x_nm = _layers(shape, weights, embedding(ids_n, weights.embedding), rotation[positions_n], attend)
    return low_rank_linear(x_nm, *weights.head)


def forward_sequences(
    shape: DenseShape, weights: DenseWeights, rotation: torch.Tensor, ids_bt: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Hidden states [b, t, m] (the head is not applied) of sequences from position 0, and each layer's keys and values
    [b, k, t, d]. Padding at the end changes nothing before it. rotation: as in decode_rows."""
    length = ids_bt.shape[1]
    positions = torch.arange(length, device=ids_bt.device)
    masks = {window: _bias(positions, positions[:, None], window, weights.embedding.dtype)
             for window in dict.fromkeys(shape.windows) if window is not None}  # fmt: skip
    stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q_bthd: torch.Tensor, k_btkd: torch.Tensor, v_btkd: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q_bthd, k_btkd, v_btkd))
        stored.append((k, v))
        window = shape.windows[layer]
        mask = None if window is None else masks[window]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    x_btm = _layers(shape, weights, embedding(ids_bt, weights.embedding), rotation[:length], attend)
    return x_btm, stored


def _layers(
    shape: DenseShape, weights: DenseWeights, x: torch.Tensor, rotation: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """All layers and the last norm: x [..., m], rotation [..., 2, d] -> [..., m]."""
    cosine, sine = rotation[..., None, 0, :], rotation[..., None, 1, :]
    eps = torch.full((), shape.eps, device=x.device)
    rotated = shape.heads + shape.kv_heads
    for number, layer in enumerate(weights.layers):
        qkv = _project_all(_norm(x, layer.attention_norm, eps), layer.qkv).unflatten(-1, (-1, shape.head_dim))
        qk, v = qkv[..., :rotated, :], qkv[..., rotated:, :]
        if layer.qk_norm is not None:
            qk = _norm(qk, layer.qk_norm, eps)
        qk = torch.addcmul(qk * cosine, qk.roll(shape.head_dim // 2, -1), sine)
        q, k = qk[..., : shape.heads, :], qk[..., shape.heads :, :]
        x = x + low_rank_linear(attend(number, q, k, v), *layer.out)
        gate, up = _project_all(_norm(x, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
        x = x + low_rank_linear(silu(gate) * up, *layer.down)
    return _norm(x, weights.norm, eps)


def _project_all(x: torch.Tensor, parts: tuple[SlotTensors, ...]) -> torch.Tensor:
    projected = [low_rank_linear(x, *part) for part in parts]
    return projected[0] if len(projected) == 1 else torch.cat(projected, -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Root mean square norm over the last dimension, in float32; weight [..., last]. On a CPU torch's own rms_norm is
    put together of smaller kernels, and a whole step took 9 % longer with it."""
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.addcmul(eps, size, size, value=1 / x.shape[-1]).rsqrt_()
    return (wide * inverse).to(x.dtype) * weight


def _bias(keys_l: torch.Tensor, queries: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What is added to attention scores: 0 where a key's position <= the query's (and inside the window), else -inf.
    `queries` [..., 1] are positions; the result is [..., l]."""
    hidden = keys_l > queries if window is None else (keys_l > queries) | (keys_l <= queries - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _attend_seen(
    q_nkgd: torch.Tensor, k_nkld: torch.Tensor, v_nkld: torch.Tensor, bias_n11l: torch.Tensor
) -> torch.Tensor:
    """Attention of one new token a row; the heads that share a key-value head are its queries."""
    if q_nkgd.dtype != torch.float32:
        return scaled_dot_product_attention(q_nkgd, k_nkld, v_nkld, attn_mask=bias_n11l)
    # Two plain products are faster than the fused kernel for so few queries (float32, CPU: 86 against 143 us for 64
    # rows of 41 positions); in lower precision they would round the scores.
    scores_nkgl = torch.matmul(q_nkgd, k_nkld.transpose(2, 3))
    scores_nkgl = torch.add(bias_n11l, scores_nkgl, alpha=q_nkgd.shape[-1] ** -0.5)
    return torch.matmul(scores_nkgl.softmax(-1), v_nkld)

"""Attention over packed sequences against attention written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.packed_attention import ALONE, WASTE, Unpackable, make_layout, packed_attention, packed_mask

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 3


class Grouped(nn.Module):
    num_key_value_groups = HEADS // KV_HEADS


def written_out(query: np.ndarray, key: np.ndarray, value: np.ndarray, lengths: list[int], scale: float) -> np.ndarray:
    """[n, heads, width] of query [heads, n, width] and key and value [kv heads, n, width], a token at a time."""
    out = np.zeros((query.shape[1], HEADS, WIDTH))
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        for place in range(start, start + length):
            for head in range(HEADS):
                seen = slice(start, place + 1)
                scores = key[head // 2, seen] @ query[head, place] * scale
                share = np.exp(scores - scores.max())
                out[place, head] = share / share.sum() @ value[head // 2, seen]
    return out


def inputs(tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, tokens, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 99))
def test_each_sequence_attends_to_itself_alone(lengths: list[int], seed: int) -> None:
    tensors = inputs(sum(lengths), seed)
    out, _ = packed_attention(Grouped(), *tensors, None, layout=make_layout(lengths, CPU), scaling=0.7)
    expected = written_out(*(tensor.detach().numpy()[0] for tensor in tensors), lengths, 0.7)
    np.testing.assert_allclose(out.detach().numpy()[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[4, 4], [5, 4, 4], [6, 1, 6, 2]])
def test_its_gradient_is_that_of_finite_differences(lengths: list[int]) -> None:
    layout = make_layout(lengths, CPU)
    assert any(block.rows > 1 for block in layout.blocks) or lengths == [6, 1, 6, 2]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return packed_attention(Grouped(), query, key, value, None, layout=layout, scaling=0.7)[0]

    assert torch.autograd.gradcheck(attend, inputs(sum(lengths), 0))


@given(st.lists(st.integers(1, 3 * ALONE), min_size=1, max_size=60), st.booleans())
def test_blocks_cover_every_token_once_with_little_padding(lengths: list[int], ordered: bool) -> None:
    lengths = sorted(lengths, reverse=True) if ordered else lengths
    blocks = make_layout(lengths, CPU).blocks
    assert [block.start for block in blocks] == np.cumsum([0, *(block.tokens for block in blocks)])[:-1].tolist()
    assert sum(block.tokens for block in blocks) == sum(lengths)
    assert sum(block.rows for block in blocks) == len(lengths)
    for block in blocks:
        assert block.rows == 1 or (block.longest <= ALONE and block.rows * block.longest <= WASTE * block.tokens)
        if block.spread is None:
            assert block.rows * block.longest == block.tokens
        else:
            assert block.gather is not None
            assert block.spread[block.gather].tolist() == list(range(block.tokens))


def test_many_short_sequences_are_few_calls() -> None:
    lengths = sorted(np.random.default_rng(0).integers(5, 60, 1000).tolist(), reverse=True)
    assert len(make_layout(lengths, CPU).blocks) <= 12


def test_what_is_not_plain_causal_attention_is_refused_saying_what_it_is() -> None:
    tensors = inputs(4, 0)
    for option in ("sliding_window", "softcap", "s_aux"):
        with pytest.raises(Unpackable, match=option):
            packed_attention(Grouped(), *tensors, None, **{option: 2})
    with pytest.raises(Unpackable, match="not causal"):
        packed_attention(Grouped(), *tensors, None, is_causal=False)
    with pytest.raises(Unpackable, match="masks"):
        packed_attention(Grouped(), *tensors, torch.zeros(1, 1, 4, 4))
    with pytest.raises(Unpackable, match="last 8 tokens"):
        packed_mask(local_size=8)
    with pytest.raises(Unpackable, match="mask"):
        packed_mask(use_vmap=True)

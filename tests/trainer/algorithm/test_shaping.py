"""Length shaping against its definition by cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.shaping import overlong


def by_cases(length: int, limit: int, buffer: int, penalty: float) -> float:
    expected = limit - buffer
    if buffer == 0 or length <= expected:
        return 0.0
    return -penalty if length > limit else (expected - length) / buffer * penalty


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=20),
    limit=st.integers(1, 200),
    share=st.floats(0, 1),
    penalty=st.floats(0.01, 10),
)
def test_overlong_equals_its_definition(lengths: list[int], limit: int, share: float, penalty: float) -> None:
    buffer = int(share * limit)
    out = overlong(torch.tensor(lengths, dtype=torch.int64), limit, buffer, penalty)
    assert out.dtype == torch.float64
    assert out.tolist() == pytest.approx([by_cases(length, limit, buffer, penalty) for length in lengths])


def test_the_penalty_begins_at_the_buffer_and_is_whole_at_the_limit() -> None:
    out = overlong(torch.tensor([12, 16, 18, 20, 10**9]), limit=20, buffer=4, penalty=2.0)
    assert out.tolist() == [0, 0, -1, -2, -2]


@pytest.mark.parametrize("buffer", [-1, 21])
def test_a_buffer_beyond_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        overlong(torch.tensor([1]), 20, buffer, 1.0)

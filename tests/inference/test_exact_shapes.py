"""With fixed shapes a request gets the same bits alone, in a crowd, in any row, late or early, under any neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from inference.engine import EngineError
from inference.exact_shapes import BLOCK, blocks, why_not_exact


def bits(completion) -> tuple[bytes, bytes]:
    return completion.tokens.tobytes(), completion.logprobs.tobytes()


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "mistral", "gpt2", "gemma3_text"])
def test_the_same_request_alone_among_31_others_and_in_other_slots(kind, tiny_model, finish_all):
    tiny = tiny_model(kind)
    request = tiny.request(3, length=6, new=20, temperature=0.9)
    alone = tiny.engine(slots=1, exact=True)
    alone.submit(request)
    expected = bits(finish_all(alone)[3])
    for place, slots in [(0, 32), (13, 32), (31, 32), (63, 64), (70, 80), (5, 6)]:
        crowd = tiny.engine(slots=slots, exact=True)
        for i in range(slots):
            other = tiny.request(100 + i, length=2 + i % 9, new=3 + i % 17, temperature=i % 4 / 4)
            crowd.submit(request if i == place else other)
        assert bits(finish_all(crowd)[3]) == expected, (place, slots)


def test_a_whole_group_gets_the_same_bits_in_one_wave_and_one_by_one(qwen, finish_all):
    """Late members compute the prompt again: they do not copy it from one that runs."""
    requests = [qwen.request(i, length=6, new=4 + 5 * i, prompt_seed=1) for i in range(8)]
    outcomes = []
    for slots in (2, 8):
        engine = qwen.engine(slots=slots, exact=True)
        for request in requests:
            engine.submit(request)
        outcomes.append({sample: bits(done) for sample, done in finish_all(engine).items()})
    assert outcomes[0] == outcomes[1]


def test_a_pinned_request_gets_the_same_bits_beside_others_of_its_own_and_of_other_policies(qwen, finish_all):
    pinned = qwen.request(3, length=6, new=20, policy=qwen.policy(1)[0])
    alone = qwen.engine((1,), slots=4, exact=True)
    alone.submit(pinned)
    expected = bits(finish_all(alone)[3])
    crowd = qwen.engine((0, 1, 2), slots=90, exact=True)
    for i in range(80):
        policy = qwen.policy(i % 3)[0]
        crowd.submit(pinned if i == 20 else qwen.request(100 + i, length=2 + i % 9, new=3 + i % 17, policy=policy))
    done = {}
    for _ in range(6):  # until rows have moved, then a flip
        done |= {each.key[1]: each for each in crowd.step()}
    crowd.flip(qwen.policy(2)[0], "finish")
    done |= finish_all(crowd)
    assert bits(done[3]) == expected
    assert done[3].versions[0].version == 1


def test_without_fixed_shapes_the_bits_do_depend_on_the_crowd(qwen, finish_all):
    """What this file shows is not true of itself."""
    seen = set()
    for slots in (1, 7, 32):
        engine = qwen.engine(slots=slots)
        for i in range(slots):
            engine.submit(qwen.request(3 if i == 0 else 100 + i, length=6 if i == 0 else 2 + i, new=20))
        seen.add(bits(finish_all(engine)[3]))
    assert len(seen) > 1


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (256, 128), (96, 33), (100, 77), (1024, 3072)])
def test_a_row_of_a_product_of_a_block_has_the_same_bits_in_every_place(inputs, outputs):
    torch.manual_seed(0)
    weight, row = torch.randn(outputs, inputs), torch.randn(inputs)
    results = set()
    for place in range(BLOCK):
        x = torch.randn(BLOCK, inputs)
        x[place] = row
        results.add(linear(x, weight)[place].numpy().tobytes())
    assert len(results) == 1


@given(st.integers(0, 100), st.integers(1, 100), st.integers(0, 60))
@settings(max_examples=200)
def test_blocks_cover_every_row_of_a_step_once_and_stay_within_the_rows(start, count, more):
    rows = max(start + count + more, BLOCK)
    covered = []
    for block in blocks(range(start, start + count), rows):
        assert block.start >= 0
        assert block.start + BLOCK <= rows
        values = np.arange(start, start + count)
        filled = block.filled(values, -1)
        assert len(filled) == BLOCK
        covered += [(block.start + place, int(value)) for place, value in enumerate(filled) if value >= 0]
    assert covered == [(row, row) for row in range(start, start + count)]


def test_an_engine_that_cannot_promise_the_bits_says_what_to_set(qwen):
    assert "model.dtype" in why_not_exact(torch.device("cpu"), torch.bfloat16)
    assert "model.device" in why_not_exact(torch.device("cuda"), torch.float32)
    with pytest.raises(EngineError, match=r"run\.deterministic"):
        qwen.engine(dtype="bfloat16", exact=True)

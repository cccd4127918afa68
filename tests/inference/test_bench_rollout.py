"""The benchmark of the engine: both sides do the work they are credited with, and nothing else counts."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from inference.bench_rollout import Engine, Generate, Group, Load

LOAD = Load(slots=16, shortest=2, longest=6)


class Supply:
    """Groups of random prompts, and the lengths that were asked for so far."""

    def __init__(self, tiny, lengths):
        self.asked = []
        self._tiny, self._lengths = tiny, itertools.cycle(lengths)

    def __iter__(self):
        return self

    def __next__(self):
        lengths = list(itertools.islice(self._lengths, 8))
        self.asked += lengths
        return Group(len(self.asked) // 8, self._tiny.prompt(len(self.asked), 5).tolist(), lengths)


def test_generate_is_credited_with_the_lengths_asked_for_not_with_what_it_pads_them_to(qwen):
    supply = Supply(qwen, lengths=range(2, 7))
    arm = Generate(qwen.path, LOAD, supply, pad=0)
    assert arm.work() == sum(supply.asked)
    assert len(supply.asked) == 16


def test_the_engine_is_credited_with_attempts_that_ended_and_kept_as_busy_as_a_node_keeps_it(qwen):
    supply = Supply(qwen, lengths=[4])
    arm = Engine(qwen.path, LOAD, supply, context=11, mode="never")
    tokens = 0
    for _ in range(25):
        tokens += arm.work()
        under_way = arm.engine.active
        assert tokens == 4 * (len(supply.asked) - under_way)
    assert tokens > 16 * 4
    assert max(len(supply.asked) - tokens // 4, 0) <= 16 + 8


def test_both_sides_sample_from_the_same_distribution(qwen):
    arm = Engine(qwen.path, LOAD, Supply(qwen, [4]), context=11, mode="never")
    sequence = qwen.prompt(0, 11)
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(qwen.path)(input_ids=ids).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    policy = arm.engine.serving
    assert policy is not None
    np.testing.assert_allclose(arm.engine.score(policy, [sequence])[0], expected.numpy(), atol=1e-5)

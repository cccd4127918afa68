"""The likeliest tokens at each place, as the engine sends them, against plain transformers and peft."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inference.engine import EngineError, Prefix

K = 6


def oracle(tiny, version, prompt, tokens, temperature):
    """Log-probabilities of the whole vocabulary at the place of each of `tokens`, from one full forward."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = tiny.oracle(version)(input_ids=ids, use_cache=False).logits[0].double()
    return torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1].numpy()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])  # by the lean forward, and by transformers'
def test_the_likeliest_tokens_are_those_of_a_full_recompute(kind, exact, tiny_model, finish_all):
    tiny = tiny_model(kind)
    engine = tiny.engine(top_tokens=K, exact=exact)
    requests = [tiny.request(i, length=2 + 3 * i, new=7 + i, temperature=(1.0, 0.6, 1.7, 0.0)[i % 4]) for i in range(6)]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        got = done[i]
        assert got.top is not None
        assert (got.top.ids.dtype, got.top.logprobs.dtype) == (np.int32, np.float32)
        expected = oracle(tiny, 0, request.prompt, got.tokens, request.sampling.temperature)
        assert got.top.ids.shape == got.top.logprobs.shape == (len(got.tokens), K)
        np.testing.assert_allclose(got.top.logprobs, -np.sort(-expected, axis=1)[:, :K], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, got.top.ids, 1), got.top.logprobs, atol=1e-5, rtol=1e-5)
        among = got.top.ids == got.tokens[:, None]
        np.testing.assert_array_equal(got.top.logprobs[among], got.logprobs[among.any(1)])
        assert among.any(1).mean() > 0.5


def test_likeliest_tokens_stay_with_their_request_when_rows_move_among_those_of_another_policy(qwen, finish_all):
    engine = qwen.engine(versions=(0, 1), slots=5, top_tokens=K)
    requests = [qwen.request(i, length=3 + i, new=4 + 5 * i, policy=qwen.policy(i % 2)[0]) for i in range(9)]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        expected = oracle(qwen, i % 2, request.prompt, done[i].tokens, 1.0)
        np.testing.assert_allclose(done[i].top.logprobs, -np.sort(-expected, axis=1)[:, :K], atol=1e-5, rtol=1e-5)


def test_tokens_are_sampled_alike_with_and_without(qwen, finish_all):
    request = qwen.request(0, length=6, new=20)
    found = []
    for top in (0, K):
        engine = qwen.engine(top_tokens=top)
        engine.submit(request)
        found.append(finish_all(engine)[0])
    assert found[0].top is None
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    np.testing.assert_array_equal(found[0].logprobs, found[1].logprobs)


def test_more_than_the_vocabulary_and_prefixes_that_lack_them_are_refused(qwen):
    assert qwen.engine(top_tokens=qwen.vocab).vocabulary_size == qwen.vocab
    with pytest.raises(EngineError, match=rf"center_scores = {qwen.vocab + 1}: .* {qwen.vocab} tokens"):
        qwen.engine(top_tokens=qwen.vocab + 1)
    engine, request = qwen.engine(top_tokens=K), qwen.request(0)
    prefix = Prefix(np.array([3], np.int32), np.array([-1.0], np.float32), ())
    with pytest.raises(EngineError, match=r'prefix of request 7/0 lacks .* handover = "discard"'):
        engine.submit(request._replace(prefix=prefix))
    assert engine.active == 0

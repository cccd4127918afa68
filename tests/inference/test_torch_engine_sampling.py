"""Tokens and log-probabilities of the torch engine against plain transformers and peft."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.wire.messages import SamplingParams
from inference.engine import EngineError, Request
from inference.sampling import processed, request_uniforms, sample

KINDS = ["qwen3", "llama", "qwen2", "gpt2", "gemma3_text", "mistral"]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_recompute_for_ragged_prompts_and_temperatures(kind, tiny_model, finish_all):
    tiny = tiny_model(kind)
    engine = tiny.engine(slots=4)
    requests = [
        tiny.request(i, length=1 + 3 * i % 11, new=9 + i, temperature=(1.0, 0.6, 1.7, 0.0)[i % 4]) for i in range(9)
    ]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    assert len(done) == 9
    for i, request in enumerate(requests):
        got = done[i]
        assert got.finish == "length"
        assert len(got.tokens) == 9 + i
        assert got.tokens.dtype == np.int32
        assert got.logprobs.dtype == np.float32
        assert sum(run.count for run in got.versions) == len(got.tokens)
        expected = tiny.logprobs(0, request.prompt, got.tokens, request.sampling.temperature)
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind, tiny_model, finish_all):
    tiny = tiny_model(kind)
    engine = tiny.engine()
    engine.submit(tiny.request(0, length=7, new=12, temperature=0.0))
    ids = torch.from_numpy(tiny.prompt(0, 7).astype(np.int64))[None]
    expected = tiny.oracle(0).generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    assert finish_all(engine)[0].tokens.tolist() == expected[0, 7:].tolist()


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(qwen, finish_all):
    request = qwen.request(3, length=6, new=20)
    alone = qwen.engine(slots=1)
    alone.submit(request)
    expected = finish_all(alone)[3]
    crowd = qwen.engine(slots=6)
    for i in range(14):
        crowd.submit(request if i == 3 else qwen.request(i, length=2 + i, new=3 + 2 * i, temperature=i / 4))
    got = finish_all(crowd)[3]
    assert got.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_a_group_shares_its_prompt_and_its_members_differ_by_seed(qwen, finish_all):
    # More members than slots: the late ones copy the prompt from rows that still run, or prefill it again.
    engine = qwen.engine(slots=3)
    requests = [qwen.request(i, length=6, new=4 + 5 * i, prompt_seed=1) for i in range(8)]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        expected = qwen.logprobs(0, request.prompt, done[i].tokens, 1.0)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)
    assert len({tuple(done[i].tokens[:4].tolist()) for i in done}) > 5


def test_late_members_of_a_group_copy_the_prompt_of_a_running_one(qwen, finish_all, monkeypatch):
    engine = qwen.engine(slots=2)
    prefilled = []
    forward = engine._runner.forward
    prefill = forward.prefill

    def counted(slot, ids, *rest):
        prefilled.append(len(ids))
        return prefill(slot, ids, *rest)

    monkeypatch.setattr(forward, "prefill", counted)
    for i, new in enumerate((30, 2, 2, 2)):
        engine.submit(qwen.request(i, length=6, new=new, prompt_seed=1))
    done = finish_all(engine)
    assert prefilled == [1]
    for i in range(4):
        expected = qwen.logprobs(0, qwen.prompt(1, 6), done[i].tokens, 1.0)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)


def test_the_same_seed_repeats_and_another_seed_differs(qwen, finish_all):
    def tokens(seed):
        engine = qwen.engine()
        engine.submit(Request((0, 0), qwen.prompt(0, 5), SamplingParams(1.0, 16), seed))
        return finish_all(engine)[0].tokens.tolist()

    assert tokens(2**63 + 5) == tokens(2**63 + 5)
    assert tokens(2**63 + 5) != tokens(2**63 + 6)


def test_a_longer_stream_of_a_seed_starts_with_the_shorter_one():
    assert request_uniforms(9, 40)[:7].tolist() == request_uniforms(9, 7).tolist()


def test_sampling_follows_the_distribution_and_never_takes_an_impossible_token():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]])
    n = 20_000
    uniforms = torch.from_numpy(request_uniforms(1, n))
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample(processed(logits.expand(n, -1), torch.full((n,), 0.7)), None, uniforms)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    counts = torch.bincount(tokens, minlength=5) / n
    assert counts[[1, 4]].tolist() == [0, 0]
    assert (counts - expected).abs().max() < 4 * (0.25 / n) ** 0.5
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_stop_token_ends_a_request_and_is_part_of_it(qwen, finish_all):
    engine = qwen.engine()
    engine.submit(qwen.request(0, new=30))
    whole = finish_all(engine)[0].tokens
    stop = int(whole[10])
    first = whole.tolist().index(stop)
    engine = qwen.engine(stop_tokens={stop})
    engine.submit(qwen.request(0, new=30))
    got = finish_all(engine)[0]
    assert got.finish == "stop"
    assert got.tokens.tolist() == whole[: first + 1].tolist()
    assert len(got.logprobs) == sum(run.count for run in got.versions) == first + 1


def test_the_models_own_end_token_is_the_default(qwen, tmp_path, finish_all):
    engine = qwen.engine()
    engine.submit(qwen.request(0, new=30))
    whole = finish_all(engine)[0].tokens
    model = AutoModelForCausalLM.from_pretrained(qwen.path)
    model.generation_config.eos_token_id = [int(whole[5])]
    model.save_pretrained(tmp_path)
    engine = type(engine)(tmp_path, slots=2, max_context=48, max_resident=2, device="cpu")
    engine.install(*qwen.policy(0))
    engine.flip(qwen.policy(0)[0], "finish")
    engine.submit(qwen.request(0, new=30))
    assert finish_all(engine)[0].finish == "stop"


def test_max_context_bounds_prompt_and_new_tokens_together(qwen, finish_all):
    engine = qwen.engine(max_context=12)
    for i, length in enumerate((1, 5, 11)):
        engine.submit(qwen.request(i, length=length, new=40))
    done = finish_all(engine)
    assert [len(done[i].tokens) for i in range(3)] == [11, 7, 1]
    for i, length in enumerate((1, 5, 11)):
        expected = qwen.logprobs(0, qwen.prompt(i, length), done[i].tokens, 1.0)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(1.0, 4), "empty"),
        ([1, 29], SamplingParams(1.0, 4), "token id 29"),
        ([-1], SamplingParams(1.0, 4), "token id -1"),
        ([1] * 48, SamplingParams(1.0, 4), "no room"),
        ([1], SamplingParams(1.0, 4, top_p=0.9), "top_p"),
        ([1], SamplingParams(-1.0, 4), "temperature"),
        ([1], SamplingParams(1.0, 0), "max_new_tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_their_name(qwen, prompt, sampling, message):
    engine = qwen.engine()
    with pytest.raises(EngineError, match=message) as error:
        engine.submit(Request((4, 2), np.array(prompt, dtype=np.int32), sampling, 0))
    assert "4/2" in str(error.value)
    assert engine.active == 0


def test_score_equals_a_full_recompute_and_leaves_running_requests_alone(qwen, finish_all):
    engine = qwen.engine(versions=(0, 1))
    alone = qwen.engine()
    for one in (engine, alone):
        one.submit(qwen.request(0, new=20))
        one.step()
    sequences = [qwen.prompt(50 + i, length) for i, length in enumerate((9, 1, 60, 2))]
    for version in (0, 1):
        scores = engine.score(qwen.policy(version)[0], sequences)
        for sequence, score in zip(sequences, scores, strict=True):
            assert score.dtype == np.float32
            np.testing.assert_allclose(score, qwen.logprobs(version, sequence[:1], sequence[1:], 1.0), atol=1e-5)
    np.testing.assert_array_equal(finish_all(engine)[0].logprobs, finish_all(alone)[0].logprobs)

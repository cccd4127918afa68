"""What is sampled, and the log-probabilities that are told of it, against transformers and peft."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_house import CLOSE, Bed
from served_model import nucleus

from async_rl.version import PolicyId

LENGTHS = (1, 7, 127, 128, 129, 300)  # about a cache block of vLLM on a CPU, and several of them


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probabilities_are_those_of_transformers_with_peft_at_the_sampling_temperature(
    adapters: Bed, temperature: float
) -> None:
    requests = [
        adapters.model.request(i, length=length, new=16, temperature=temperature) for i, length in enumerate(LENGTHS)
    ]
    done = adapters.run(requests)
    for request in requests:
        completion = done[request.key[1]]
        assert (completion.finish, len(completion.tokens)) == ("length", 16)
        assert (completion.tokens.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        assert completion.versions == adapters.runs((0, 16))
        adapters.assert_sampled_by(0, request, completion)


def test_at_temperature_0_the_likeliest_token_is_taken(adapters: Bed) -> None:
    requests = [adapters.model.request(i, length=length, new=24, temperature=0.0) for i, length in enumerate(LENGTHS)]
    done = adapters.run(requests)
    for request in requests:
        tokens = done[request.key[1]].tokens
        ids = torch.from_numpy(np.concatenate([request.prompt, tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = adapters.model.oracle(0)(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
        assert (logits.max(-1).values - logits.gather(1, ids[0, len(request.prompt) :, None])[:, 0]).max() < CLOSE


@pytest.mark.needs("top_p")
def test_with_top_p_log_probabilities_are_of_what_is_left_made_to_sum_to_one(adapters: Bed) -> None:
    requests = [
        adapters.model.request(i, length=9, new=16, temperature=temperature, top_p=top_p)
        for i, (temperature, top_p) in enumerate([(1.0, 0.9), (0.7, 0.8), (1.0, 0.3), (0.0, 0.9)])
    ]
    done = adapters.run(requests)
    for request in requests[:-1]:
        adapters.assert_sampled_by(0, request, done[request.key[1]])


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), pytest.param(1.0, 0.8, marks=pytest.mark.needs("top_p"))]
)
def test_tokens_come_as_often_as_their_probabilities_say(adapters: Bed, temperature: float, top_p: float) -> None:
    model, many = adapters.model, 400
    prompt = model.prompt(5, 20)
    first = model.request(0, length=20, new=1, temperature=temperature, top_p=top_p)
    requests = [first._replace(key=(8, i), prompt=prompt, seed=i) for i in range(many)]
    done = adapters.run(requests)
    counts = np.bincount([int(done[i].tokens[0]) for i in range(many)], minlength=96)
    with torch.no_grad():
        logits = model.oracle(0)(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1:]
    logprobs = torch.log_softmax(logits / temperature, -1)
    expected = many * (nucleus(logprobs, top_p) if top_p < 1 else logprobs).exp()[0].double().numpy()
    often = expected >= 5
    pooled = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum())
    chi2 = sum((count - mean) ** 2 / mean for count, mean in zip(*pooled, strict=True) if mean > 0)
    freedom = often.sum()
    # Wilson and Hilferty: the cube root is nearly normal. Seeds are fixed, so this is five deviations once and for all.
    assert (chi2 / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5
    assert counts[expected < 1e-12].sum() == 0


@pytest.mark.needs("seeds")
def test_a_request_is_the_same_alone_and_in_company_and_another_with_another_seed(adapters: Bed) -> None:
    request = adapters.model.request(0, length=30, new=24)
    alone = adapters.run([request])[0]
    other = request._replace(key=(7, 1), seed=5)
    together = adapters.run([adapters.model.request(i, length=i, new=40) for i in range(2, 8)] + [request, other])
    assert together[0].tokens.tolist() == alone.tokens.tolist()
    assert together[1].tokens.tolist() != alone.tokens.tolist()


def test_a_group_of_equal_prompts_is_sampled_with_different_seeds(adapters: Bed) -> None:
    first = adapters.model.request(0, length=200, new=16)
    requests = [first._replace(key=(7, i), seed=i) for i in range(6)]
    done = adapters.run(requests)
    assert len({tuple(done[i].tokens.tolist()) for i in range(6)}) == 6
    for request in requests:
        adapters.assert_sampled_by(0, request, done[request.key[1]])


def test_score_is_the_log_probability_under_whichever_resident_policy_and_leaves_what_runs_alone(adapters: Bed) -> None:
    adapters.install(1)
    zero = {name: tensor * ("lora_A" in name) for name, tensor in adapters.model.tensors(seed=3).items()}
    base, path = adapters.model.write(9, zero, adapters.model.config())
    adapters.engine.install(base, path)
    request = adapters.model.request(0, length=10, new=60)
    adapters.begin([request])
    sequences = [adapters.model.prompt(50 + i, length) for i, length in enumerate((9, 1, 200, 2, 300))]
    policies: list[tuple[PolicyId, int | None]] = [
        (adapters.model.policy(0)[0], 0),
        (adapters.model.policy(1)[0], 1),
        (base, None),
    ]
    for policy, version in (*policies, *policies):
        scores = adapters.engine.score(policy, sequences)
        for sequence, score in zip(sequences, scores, strict=True):
            expected = adapters.model.logprobs(version, sequence[:1], sequence[1:])
            assert score.dtype == np.float32
            np.testing.assert_allclose(score, expected, atol=CLOSE, rtol=0)
    done = adapters.finish()
    adapters.assert_sampled_by(0, request, done[0])


def test_policies_of_the_tests_are_far_enough_apart_to_tell_one_from_another(adapters: Bed) -> None:
    """Else nothing that the tests of this folder compare would mean much."""
    tokens = adapters.model.prompt(1, 100)
    by = [adapters.model.logprobs(version, tokens[:1], tokens[1:]) for version in (None, 0, 1, 2)]
    for i, one in enumerate(by):
        for other in by[:i]:
            assert np.abs(one - other).mean() > 0.1

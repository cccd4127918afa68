"""Requests that move from one engine to another: nothing is sampled twice, and the text is what it would have been."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.version import VersionRun
from async_rl.wire.messages import SamplingParams
from inference.engine import EngineError, Prefix


def taken(engine, request, version, tiny):
    """What a node hands over of a request: to be gone on with under the policy that sampled it last."""
    prefix = engine.take_out(request.key)
    assert prefix is not None
    return request._replace(prefix=prefix._replace(policy=tiny.policy(version)[0]))


def steps(engine, count):
    done = {}
    for _ in range(count):
        done |= {completion.key[1]: completion for completion in engine.step()}
    return done


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_under_the_same_policy_the_text_is_that_of_an_uninterrupted_request(tiny_model, finish_all, kind, at):
    tiny = tiny_model(kind)
    requests = [tiny.request(i, length=3 + 2 * i, new=16, temperature=(1.0, 0.0, 0.7)[i]) for i in range(3)]
    whole = tiny.engine()
    for request in requests:
        whole.submit(request)
    expected = finish_all(whole)

    first, second = tiny.engine(), tiny.engine(slots=3)
    second.submit(tiny.request(9, length=4, new=20))  # it is busy with something else
    steps(second, 2)
    for request in requests:
        first.submit(request)
    steps(first, at)
    moved = [taken(first, request, 0, tiny) for request in requests]
    assert first.active == 0
    assert set(first.resident.values()) == {0}
    for request in moved:
        second.submit(request)
    done = finish_all(second)
    for i, request in enumerate(moved):
        assert done[i].tokens.tolist() == expected[i].tokens.tolist()
        np.testing.assert_allclose(done[i].logprobs, expected[i].logprobs, atol=1e-5)
        assert (done[i].versions, done[i].finish) == (expected[i].versions, expected[i].finish)
        assert done[i].resumed == len(request.prefix.tokens) == at + 1
        assert done[i].logprobs[: at + 1].tolist() == request.prefix.logprobs.tolist()
        assert done[i].sampling_s > request.prefix.sampling_s > 0


def test_the_receiver_samples_only_what_was_missing(qwen, finish_all):
    """Alone on an engine, m missing tokens take m - 1 steps: the first gives two, one with the prefill."""
    first, second = qwen.engine(), qwen.engine()
    request = qwen.request(0, length=6, new=16)
    first.submit(request)
    steps(first, 5)
    second.submit(taken(first, request, 0, qwen))
    assert steps(second, 8) == {}
    (completion,) = second.step()
    assert (len(completion.tokens), completion.resumed) == (16, 6)


def test_under_another_policy_the_prefix_stays_and_the_rest_is_the_new_policys(qwen, finish_all):
    first, second = qwen.engine(), qwen.engine(versions=(1,))
    request = qwen.request(0, length=6, new=16)
    first.submit(request)
    steps(first, 5)
    moved = taken(first, request, 0, qwen)  # wants version 0, which is not resident there
    second.submit(moved)
    done = finish_all(second)[0]
    assert done.tokens[:6].tolist() == moved.prefix.tokens.tolist()
    digests = [qwen.policy(version)[0].digest for version in (0, 1)]
    assert done.versions == (VersionRun(0, digests[0], 6), VersionRun(1, digests[1], len(done.tokens) - 6))
    new = qwen.logprobs(1, request.prompt, done.tokens, 1.0)
    np.testing.assert_allclose(done.logprobs[6:], new[6:], atol=1e-5)
    assert set(second.resident.values()) == {0}


def test_what_has_not_begun_gives_nothing_or_the_prefix_it_came_with(qwen):
    engine = qwen.engine(slots=1)
    running, fresh, begun = (qwen.request(i, new=20) for i in range(3))
    other = qwen.engine()
    other.submit(begun)
    steps(other, 3)
    begun = taken(other, begun, 0, qwen)
    for request in (running, fresh, begun):
        engine.submit(request)
    steps(engine, 2)
    assert [request.key for request in engine.waiting()] == [fresh.key, begun.key]
    assert engine.take_out(fresh.key) is None
    assert engine.take_out(begun.key) == begun.prefix._replace(resumed=4)
    assert engine.take_out((99, 99)) is None
    assert list(engine.resident.values()) == [1]
    assert engine.active == 1


def test_an_aborted_request_that_had_not_gone_on_yet_comes_back_with_its_prefix(qwen):
    other, engine = qwen.engine(), qwen.engine()
    request = qwen.request(0, new=20)
    other.submit(request)
    steps(other, 3)
    moved = taken(other, request, 0, qwen)
    engine.submit(moved)
    engine.abort(moved.key)
    (completion,) = engine.step()
    assert (completion.finish, completion.tokens.tolist()) == ("abort", moved.prefix.tokens.tolist())
    assert (completion.resumed, list(engine.resident.values())) == (4, [0])


def test_members_of_a_group_share_their_prompt_but_never_a_prefix(qwen, finish_all):
    group = [qwen.request(i, length=7, new=14, prompt_seed=5) for i in range(4)]
    whole = qwen.engine()
    for request in group:
        whole.submit(request)
    expected = finish_all(whole)
    first, second = qwen.engine(), qwen.engine()
    for request in group[:2]:
        first.submit(request)
    steps(first, 3)
    second.submit(taken(first, group[0], 0, qwen))
    steps(second, 1)
    second.submit(group[2])  # may copy the prompt of the one that came with a prefix
    second.submit(taken(first, group[1], 0, qwen))  # must not
    second.submit(group[3])
    done = finish_all(second)
    for i in range(4):
        assert done[i].tokens.tolist() == expected[i].tokens.tolist()
        np.testing.assert_allclose(done[i].logprobs, expected[i].logprobs, atol=1e-5)


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_a_flip_before_it_goes_on_takes_it_along(qwen, finish_all, in_flight):
    other, engine = qwen.engine(), qwen.engine(versions=(0, 1))
    request = qwen.request(0, new=16)
    other.submit(request)
    steps(other, 3)
    engine.submit(taken(other, request, 0, qwen))
    assert engine.resident[qwen.policy(0)[0]] == 1
    engine.flip(qwen.policy(1)[0], in_flight)
    assert engine.resident[qwen.policy(0)[0]] == 0
    done = finish_all(engine)[0]
    assert [(run.version, run.count) for run in done.versions] == [(0, 4), (1, len(done.tokens) - 4)]


def test_it_keeps_its_old_policy_under_finish_and_gives_it_up_at_the_flip_timeout(qwen, finish_all):
    other, engine = qwen.engine(), qwen.engine(versions=(0, 1), slots=1)
    engine.flip(qwen.policy(1)[0], "finish")
    requests = [qwen.request(i, new=16) for i in range(2)]
    for request in requests:
        other.submit(request)
    steps(other, 3)
    for request in requests:
        engine.submit(taken(other, request, 0, qwen))
    steps(engine, 2)
    assert engine.resident[qwen.policy(0)[0]] == 2  # one runs, one waits
    assert engine.rebind(qwen.policy(0)[0]) == 2
    assert engine.resident[qwen.policy(0)[0]] == 0
    done = finish_all(engine)
    assert [run.version for run in done[0].versions] == [run.version for run in done[1].versions] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([1, 99, 2], np.int32)}, "token id 99"),
        ({"logprobs": np.zeros(2, np.float32)}, "2 log-probabilities"),
        ({"versions": (VersionRun(0, "0" * 64, 2),)}, "log-probabilities and runs"),
        ({"tokens": np.empty(0, np.int32)}, "is empty"),
    ],
)
def test_a_prefix_that_contradicts_itself_is_refused(qwen, change, message):
    engine = qwen.engine()
    sound = Prefix(np.array([1, 2, 3], np.int32), np.zeros(3, np.float32), (VersionRun(0, "0" * 64, 3),))
    with pytest.raises(EngineError, match=message):
        engine.submit(qwen.request(0)._replace(prefix=sound._replace(**change)))
    with pytest.raises(EngineError, match="no room for a new one"):
        engine.submit(qwen.request(0, new=3)._replace(prefix=sound))
    engine.submit(qwen.request(0, new=4)._replace(prefix=sound))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_however_often_requests_move_they_say_the_same(qwen, rng):
    """Two engines, requests that start, move and end at any time: each text is that of a quiet engine."""
    engines = [qwen.engine(slots=3), qwen.engine(slots=2)]
    requests = {i: qwen.request(i, length=2 + i, new=6 + 3 * i) for i in range(5)}
    place = {number: engines[rng.randrange(2)] for number in requests}
    for number, request in requests.items():
        place[number].submit(request)
    done: dict = {}
    sampled = 0
    for _ in range(300):
        for engine in engines:
            for completion in engine.step():
                assert completion.finish != "abort"
                assert completion.key[1] not in done
                done[completion.key[1]] = completion
                sampled += len(completion.tokens) - completion.resumed
        if len(done) == len(requests):
            break
        number = rng.randrange(5)
        request, source = requests[number], place[number]
        if rng.random() < 0.4 and number not in done:
            target = place[number] = engines[1 - engines.index(source)]
            prefix = source.take_out(request.key)
            if prefix is not None:
                sampled += len(prefix.tokens) - prefix.resumed
                prefix = prefix._replace(policy=qwen.policy(0)[0])
            requests[number] = request._replace(prefix=prefix)
            target.submit(requests[number])
    assert len(done) == len(requests)
    assert sampled == sum(len(completion.tokens) for completion in done.values())
    quiet = qwen.engine(slots=5)
    for request in requests.values():
        quiet.submit(request._replace(prefix=None))
    for _ in range(60):
        for completion in quiet.step():
            assert completion.tokens.tolist() == done[completion.key[1]].tokens.tolist()
            assert completion.versions == done[completion.key[1]].versions
    assert [set(engine.resident.values()) for engine in engines] == [{0}, {0}]
    assert requests[0].sampling == SamplingParams(1.0, 6)

"""Policies change while requests are under way: what each in-flight policy does, and which version every token has."""

from __future__ import annotations

import numpy as np
import pytest
from engine_house import CLOSE, LONG, Bed
from served_model import logprobs_across

from inference.engine import Completion, EngineError, InFlight, Request

LENGTHS = (5, 130, 300)


def long_requests(bed: Bed, first: int = 0) -> list[Request]:
    return [bed.model.request(first + i, length=length, new=LONG) for i, length in enumerate(LENGTHS)]


def assert_versions(bed: Bed, completion: Completion, *versions: int) -> list[int]:
    """Its tokens have these versions, in this order, each with its digest; how many each."""
    counts = [run.count for run in completion.versions]
    assert completion.versions == bed.runs(*zip(versions, counts, strict=True))
    assert min(counts) > 0
    assert sum(counts) == len(completion.tokens) == len(completion.logprobs) == LONG
    return counts


def test_finish_keeps_old_requests_on_the_old_policy_to_their_end_and_starts_new_ones_on_the_new(
    adapters: Bed,
) -> None:
    requests = long_requests(adapters)
    adapters.install(1)
    adapters.begin(requests)
    adapters.serve(1, "finish")
    later = adapters.model.request(9, length=300, new=20)
    adapters.submit([later])
    assert adapters.uses()[0] == 3
    done = adapters.finish()
    for request in requests:
        assert assert_versions(adapters, done[request.key[1]], 0) == [LONG]
        adapters.assert_sampled_by(0, request, done[request.key[1]])
    assert done[9].versions == adapters.runs((1, 20))
    adapters.assert_sampled_by(1, later, done[9])
    assert adapters.uses() == {0: 0, 1: 0}


def test_recompute_goes_on_exactly_as_the_new_policy_would_after_what_there_is(adapters: Bed) -> None:
    requests = long_requests(adapters)
    adapters.install(1)
    adapters.begin(requests)
    adapters.serve(1, "recompute")
    assert adapters.uses()[0] == 0
    done = adapters.finish()
    for request in requests:
        completion = done[request.key[1]]
        before, _ = assert_versions(adapters, completion, 0, 1)
        adapters.assert_sampled_by(0, request, completion, slice(before))
        adapters.assert_sampled_by(1, request, completion, slice(before, None))


@pytest.mark.needs("continue")
def test_continue_goes_on_under_the_new_policy_after_what_the_old_one_has_read(continuing: Bed) -> None:
    """Up to the flip the old policy's to the token. After it the KV cache is still the old one's, so what comes is
    neither policy's own: it is not what the old one would say, nor the new one from the beginning."""
    requests = long_requests(continuing)
    continuing.install(1)
    continuing.begin(requests)
    continuing.serve(1, "continue")
    assert continuing.uses() == {0: 0, 1: 3}
    done = continuing.finish()
    for request in requests:
        completion = done[request.key[1]]
        before, _ = assert_versions(continuing, completion, 0, 1)
        continuing.assert_sampled_by(0, request, completion, slice(before))
        old, new = (continuing.model.oracle(version) for version in (0, 1))
        mixed = logprobs_across(old, new, request.prompt, completion.tokens, before)
        np.testing.assert_allclose(completion.logprobs[before:], mixed, atol=CLOSE, rtol=0)
        fresh = continuing.model.logprobs(1, request.prompt, completion.tokens)
        assert np.abs(fresh - completion.logprobs)[before:].max() > 0.01


@pytest.mark.needs("continue")
def test_a_request_after_a_flip_under_continue_has_nothing_of_the_old_policys_cache(continuing: Bed) -> None:
    request = continuing.model.request(0, length=300, new=LONG)
    continuing.install(1)
    continuing.begin([request])
    continuing.serve(1, "continue")
    again = request._replace(key=(7, 1))
    continuing.submit([again])
    done = continuing.finish()
    assert done[1].versions == continuing.runs((1, LONG))
    continuing.assert_sampled_by(1, again, done[1])


@pytest.mark.needs("continue")
def test_several_flips_leave_a_run_of_each_version_on_a_request(continuing: Bed) -> None:
    request = continuing.model.request(0, length=20, new=400)
    continuing.begin([request])
    for version in (1, 2, 3):
        if version == 3:
            continuing.engine.evict(continuing.model.policy(1)[0])
        continuing.serve(version, "continue")
        for _ in range(4):
            assert continuing.engine.step() == []
    done = continuing.finish()
    runs = done[0].versions
    assert runs == continuing.runs(*((run.version, run.count) for run in runs))
    assert [run.version for run in runs] == [0, 1, 2, 3]
    continuing.assert_sampled_by(0, request, done[0], slice(runs[0].count))


@pytest.mark.parametrize("in_flight", ["finish", "recompute"])
def test_what_is_pinned_keeps_its_policy_while_serving_moves_on(adapters: Bed, in_flight: InFlight) -> None:
    old = adapters.model.policy(0)[0]
    adapters.install(1)
    pinned = [adapters.model.request(10 + i, length=140, new=LONG, temperature=i / 2, policy=old) for i in range(3)]
    adapters.begin(pinned)
    adapters.serve(1, in_flight)
    with pytest.raises(EngineError, match="used by"):
        adapters.engine.evict(old)
    late = adapters.model.request(20, length=140, new=8, policy=old)
    adapters.submit([late])
    done = adapters.finish()
    for request in pinned:
        assert assert_versions(adapters, done[request.key[1]], 0) == [LONG]
        adapters.assert_sampled_by(0, request, done[request.key[1]])
    adapters.assert_sampled_by(0, late, done[20])
    adapters.engine.evict(old)
    assert adapters.uses() == {1: 0}


def test_rebind_recomputes_the_unpinned_requests_of_that_policy_alone(adapters: Bed) -> None:
    old = adapters.model.policy(0)[0]
    requests = long_requests(adapters)
    pinned = adapters.model.request(9, length=10, new=LONG, policy=old)
    adapters.install(1)
    adapters.begin([*requests, pinned])
    assert adapters.engine.rebind(old) == 0  # it serves
    adapters.serve(1, "finish")
    assert adapters.engine.rebind(old) == 3
    assert adapters.uses()[0] == 1
    done = adapters.finish()
    assert_versions(adapters, done[9], 0)
    for request in requests:
        completion = done[request.key[1]]
        before, _ = assert_versions(adapters, completion, 0, 1)
        adapters.assert_sampled_by(1, request, completion, slice(before, None))


def test_the_same_prompt_under_two_policies_shares_no_cache(adapters: Bed) -> None:
    """A prompt of several blocks, under each policy in turn, twice, and under all at once."""
    model = adapters.model
    adapters.install(1, 2)
    policies = [model.policy(version)[0] for version in range(3)]
    prompt = model.prompt(3, 400)

    def request(sample: int, version: int) -> Request:
        return model.request(sample, new=6, policy=policies[version])._replace(prompt=prompt)

    turns = [request(i, version) for i, version in enumerate((0, 1, 2, 0, 1, 2))]
    done = {}
    for turn in turns:
        done |= adapters.run([turn])
    together = [request(10 + i, i % 3) for i in range(6)]
    done |= adapters.run(together)
    for each in (*turns, *together):
        version = each.policy.version if each.policy else 0
        assert done[each.key[1]].versions == adapters.runs((version, 6))
        adapters.assert_sampled_by(version, each, done[each.key[1]])


def test_two_contents_of_one_version_share_no_cache(adapters: Bed) -> None:
    """As after a trainer that was started again and trained version 5 anew."""
    model = adapters.model
    prompt = model.prompt(3, 300)
    for seed, sample in ((40, 0), (41, 1)):
        tensors = model.tensors(seed)
        policy, path = model.write(5, tensors, model.config())
        adapters.engine.install(policy, path)
        request = model.request(sample, new=6, policy=policy)._replace(prompt=prompt)
        done = adapters.run([request])
        expected = model.logprobs_with(tensors, model.config(), prompt, done[sample].tokens)
        np.testing.assert_allclose(done[sample].logprobs, expected, atol=CLOSE, rtol=0)


def test_no_more_than_max_resident_are_held_and_an_evicted_one_can_come_back(adapters: Bed) -> None:
    adapters.install(1, 2)
    assert adapters.engine.capabilities.resident_versions == len(adapters.engine.resident) == 3
    with pytest.raises(EngineError, match="3"):
        adapters.install(3)
    with pytest.raises(EngineError, match="serving"):
        adapters.engine.evict(adapters.model.policy(0)[0])
    adapters.engine.evict(adapters.model.policy(1)[0])
    adapters.serve(3)
    adapters.engine.evict(adapters.model.policy(0)[0])
    adapters.serve(1)
    request = adapters.model.request(0, length=200)
    done = adapters.run([request])
    assert done[0].versions == adapters.runs((1, 12))
    adapters.assert_sampled_by(1, request, done[0])


def test_who_takes_over_goes_on_after_the_last_token(adapters: Bed) -> None:
    requests = long_requests(adapters)
    adapters.begin(requests)
    prefixes = [adapters.engine.take_out(request.key) for request in requests]
    assert adapters.engine.active == 0
    assert adapters.uses() == {0: 0}
    adapters.serve(1)
    again = []
    for request, prefix in zip(requests, prefixes, strict=True):
        assert prefix is not None
        assert 0 < len(prefix.tokens) == len(prefix.logprobs) == sum(run.count for run in prefix.versions)
        again.append(request._replace(key=(8, request.key[1]), prefix=prefix))
    done = adapters.run(again)
    for request, prefix in zip(again, prefixes, strict=True):
        assert prefix is not None
        completion, so_far = done[request.key[1]], len(prefix.tokens)
        assert completion.resumed == so_far
        assert completion.tokens[:so_far].tolist() == prefix.tokens.tolist()
        assert completion.logprobs[:so_far].tolist() == prefix.logprobs.tolist()
        assert assert_versions(adapters, completion, 0, 1)[0] == so_far
        adapters.assert_sampled_by(0, request, completion, slice(so_far))
        adapters.assert_sampled_by(1, request, completion, slice(so_far, None))


def test_a_prefix_goes_on_under_its_own_policy_where_that_is_resident(adapters: Bed) -> None:
    request = adapters.model.request(0, length=140, new=LONG)
    adapters.begin([request])
    prefix = adapters.engine.take_out(request.key)
    assert prefix is not None
    adapters.serve(1)
    again = request._replace(key=(8, 0), prefix=prefix._replace(policy=adapters.model.policy(0)[0]))
    done = adapters.run([again])
    assert done[0].versions == adapters.runs((0, LONG))
    adapters.assert_sampled_by(0, request, done[0])


def test_nothing_is_taken_out_of_a_request_that_is_not_there(adapters: Bed) -> None:
    assert adapters.engine.take_out((99, 99)) is None

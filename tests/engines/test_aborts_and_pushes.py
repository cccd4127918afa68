"""Nothing is left of what ended: not of a request that was aborted at any moment, nor of hundreds of policies."""

from __future__ import annotations

import time

import numpy as np
import pytest
from engine_house import CONTEXT, RESIDENT, Bed, resident_bytes

from inference.engine import Completion

PUSHES, WARM_UP = 200, 60
RANK = 32  # of the adapters that are pushed: 0.4 MB, so that keeping each of 140 would be seen
GROWTH = 24e6  # bytes; what an allocator may keep meanwhile


def test_an_aborted_request_comes_back_with_what_was_sampled_and_frees_policy_and_slot(adapters: Bed) -> None:
    requests = [adapters.model.request(i, length=100, new=120) for i in range(3)]
    adapters.begin(requests)
    adapters.engine.abort(requests[1].key)
    adapters.engine.abort((99, 99))
    done = adapters.finish()
    aborted = done[1]
    assert aborted.finish == "abort"
    assert 0 < len(aborted.tokens) < 120
    assert aborted.versions == adapters.runs((0, len(aborted.tokens)))
    adapters.assert_sampled_by(0, requests[1], aborted)
    for i in (0, 2):
        assert (done[i].finish, len(done[i].tokens)) == ("length", 120)
        adapters.assert_sampled_by(0, requests[i], done[i])
    assert adapters.uses() == {0: 0}


def test_a_request_that_is_aborted_as_soon_as_it_is_sent_runs_no_more(adapters: Bed) -> None:
    """It would run on for seconds: a server does not know a request yet, of which it prepares the prompt."""
    took = []
    for i in range(4):
        request = adapters.model.request(i, length=100, new=CONTEXT - 100)
        adapters.submit([request])
        adapters.send()
        adapters.engine.abort(request.key)
        took.append(adapters.seconds_until_server_idle())
        assert [completion.finish for completion in adapters.finish().values()] == ["abort"]
    assert min(took) < 1.0  # not all: a busy machine may be late with some


def test_a_policy_can_be_evicted_as_soon_as_its_requests_are_aborted(adapters: Bed) -> None:
    """A server would look for the adapter of one that it still has, and die."""
    for i in range(10):
        request = adapters.model.request(i, length=200, new=CONTEXT - 200)
        adapters.submit([request])
        adapters.send()
        adapters.engine.abort(request.key)
        adapters.serve((i + 1) % 2)
        adapters.engine.evict(adapters.model.policy(i % 2)[0])
        adapters.finish()
    request = adapters.model.request(50, length=20, new=30)
    adapters.assert_sampled_by(0, request, adapters.run([request])[50])


def test_aborts_at_random_moments_leave_no_reference_and_nothing_running(adapters: Bed) -> None:
    random = np.random.default_rng(7)
    adapters.install(1)
    policies = [None, adapters.model.policy(0)[0], adapters.model.policy(1)[0]]
    done: dict[int, Completion] = {}
    requests = [
        adapters.model.request(i, length=int(random.integers(1, 300)), new=30, policy=policies[i % 3])
        for i in range(60)
    ]
    to_abort = [request.key for request in requests if random.random() < 0.6]
    waiting = list(requests)
    deadline = time.monotonic() + 100
    while waiting or adapters.engine.active:
        assert time.monotonic() < deadline
        if waiting and random.random() < 0.5:
            adapters.submit([waiting.pop()])
        if to_abort and random.random() < 0.4:
            adapters.engine.abort(to_abort.pop(int(random.integers(len(to_abort)))))  # waiting, running, done, unknown
        for completion in adapters.engine.step():
            assert completion.key[1] not in done
            done[completion.key[1]] = completion
    assert done.keys() == set(range(60))
    assert {completion.finish for completion in done.values()} == {"length", "abort"}
    assert adapters.uses() == {0: 0, 1: 0}
    adapters.seconds_until_server_idle()
    for request in requests[:12]:
        if len(done[request.key[1]].tokens):
            adapters.assert_sampled_by(request.policy.version if request.policy else 0, request, done[request.key[1]])


def test_200_pushes_under_load_keep_few_policies_and_no_memory(adapters: Bed) -> None:
    """Requests run all the time; each push is installed as soon as an old policy is idle, as a node does it."""
    model, engine = adapters.model, adapters.engine
    files = [
        model.write(100 + i, model.tensors(200 + i, rank=RANK, size=0.05), model.config(r=RANK)) for i in range(PUSHES)
    ]
    sample, memory, seen = 0, [], set()
    for policy, path in files:
        while len(engine.resident) >= RESIDENT:
            idle = [old for old, uses in engine.resident.items() if not uses and old != engine.serving]
            if idle:
                engine.evict(min(idle, key=lambda old: old.version))
                break
            seen |= versions_of(engine.step())
        engine.install(policy, path)
        engine.flip(policy, "finish")
        assert len(engine.resident) <= RESIDENT
        assert adapters.in_memory() <= RESIDENT
        while engine.active < 4:
            sample += 1
            adapters.submit([model.request(sample, length=140, new=8)])
        seen |= versions_of(engine.step())
        memory.append(resident_bytes())
    seen |= {run.version for completion in adapters.finish().values() for run in completion.versions}
    assert len(seen - {0}) > PUSHES / 8  # most of them are passed before a request begins under them
    assert max(memory[-10:]) - max(memory[WARM_UP - 10 : WARM_UP]) < GROWTH, [
        round(each / 1e6) for each in memory[::10]
    ]


def versions_of(completions: list[Completion]) -> set[int]:
    return {run.version for completion in completions for run in completion.versions}


@pytest.mark.needs("process")
def test_nothing_of_an_evicted_adapter_stays_in_memory_backed_storage(adapters: Bed) -> None:
    assert adapters.in_memory() == 1
    adapters.install(1)
    assert adapters.in_memory() == 2
    adapters.engine.evict(adapters.model.policy(1)[0])
    assert adapters.in_memory() == 1

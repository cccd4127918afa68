"""Adapters of the torch engine: what is refused, what happens to requests in flight, who may be evicted."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM

from async_rl.version import PolicyId, VersionRun
from inference.engine import EngineError
from inference.slot_linear import ActiveSlot, LowRank, UnmergedLinear


def runs(qwen, *counts):
    """Version runs from (version, count) pairs."""
    return tuple(VersionRun(version, qwen.policy(version)[0].digest, count) for version, count in counts)


def check_logprobs(qwen, request, completion, version, upto=None):
    expected = qwen.logprobs(version, request.prompt, completion.tokens, request.sampling.temperature)
    np.testing.assert_allclose(completion.logprobs[:upto], expected[:upto], atol=1e-5)


def start(qwen, steps, **options):
    """An engine with versions 0 and 1, serving 0, and three requests of ragged prompts after some steps."""
    engine = qwen.engine(versions=(0, 1), **options)
    requests = [qwen.request(i, length=3 + 2 * i, new=14 + i) for i in range(3)]
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        assert engine.step() == []
    return engine, requests


def test_finish_keeps_old_requests_on_the_old_policy_and_starts_new_ones_on_the_new(qwen, finish_all):
    engine, requests = start(qwen, steps=4)
    engine.flip(qwen.policy(1)[0], "finish")
    requests.append(qwen.request(3, length=4, new=18))
    engine.submit(requests[3])
    assert engine.resident == {qwen.policy(0)[0]: 3, qwen.policy(1)[0]: 0}
    done = finish_all(engine)
    for i, request in enumerate(requests):
        version = int(i == 3)
        assert done[i].versions == runs(qwen, (version, request.sampling.max_new_tokens))
        check_logprobs(qwen, request, done[i], version)


def test_two_policies_at_once_leave_each_others_requests_alone(qwen, finish_all):
    """Rows of both policies start, end and move; each request is what it would be alone."""
    engine = qwen.engine(versions=(0, 1), slots=5)
    policies = [qwen.policy(0)[0], qwen.policy(1)[0]]
    requests = [qwen.request(i, length=2 + i % 7, new=3 + i * 5 % 17, policy=policies[i % 2]) for i in range(16)]
    for request in requests:
        engine.submit(request)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        assert done[i].versions == runs(qwen, (i % 2, len(done[i].tokens)))
        check_logprobs(qwen, request, done[i], i % 2)


def test_continue_changes_the_version_in_mid_request_and_is_exact_up_to_the_flip(qwen, finish_all):
    engine, requests = start(qwen, steps=4)
    engine.flip(qwen.policy(1)[0], "continue")
    assert engine.resident == {qwen.policy(0)[0]: 0, qwen.policy(1)[0]: 3}
    done = finish_all(engine)
    for i, request in enumerate(requests):
        (before, after) = done[i].versions
        assert (before.version, after.version) == (0, 1)
        assert before.count == 5  # one with the prefill, one with each of four decodes
        assert before.count + after.count == len(done[i].tokens)
        check_logprobs(qwen, request, done[i], 0, upto=before.count)
        # The KV cache of version 0 stays, so what follows is neither policy's own distribution.
        fresh = qwen.logprobs(1, request.prompt, done[i].tokens, 1.0)
        assert np.abs(fresh[before.count :] - done[i].logprobs[before.count :]).max() > 1e-3


def test_recompute_goes_on_exactly_as_the_new_policy_would(qwen, finish_all):
    engine, requests = start(qwen, steps=4)
    engine.flip(qwen.policy(1)[0], "recompute")
    done = finish_all(engine)
    untouched, _ = start(qwen, steps=0)
    before = finish_all(untouched)
    for i, request in enumerate(requests):
        assert done[i].versions == runs(qwen, (0, 5), (1, len(done[i].tokens) - 5))
        # Tokens, log-probabilities and stamps from before the flip stay.
        assert done[i].tokens[:5].tolist() == before[i].tokens[:5].tolist()
        check_logprobs(qwen, request, done[i], 0, upto=5)
        new = qwen.logprobs(1, request.prompt, done[i].tokens, 1.0)
        np.testing.assert_allclose(done[i].logprobs[5:], new[5:], atol=1e-5)


def test_recompute_before_anything_was_sampled_is_a_request_of_the_new_policy(qwen, finish_all):
    engine, requests = start(qwen, steps=0)
    engine.flip(qwen.policy(1)[0], "recompute")
    done = finish_all(engine)
    for i, request in enumerate(requests):
        assert done[i].versions == runs(qwen, (1, len(done[i].tokens)))
        check_logprobs(qwen, request, done[i], 1)


def test_random_numbers_do_not_depend_on_a_recompute(qwen, finish_all):
    """A flip to a policy with other weights and back again before the next step changes nothing."""
    engine, _ = start(qwen, steps=4)
    engine.flip(qwen.policy(1)[0], "recompute")
    engine.flip(qwen.policy(0)[0], "recompute")
    untouched, _ = start(qwen, steps=0)
    got, expected = finish_all(engine), finish_all(untouched)
    for i in range(3):
        assert got[i].tokens.tolist() == expected[i].tokens.tolist()
        assert got[i].versions == expected[i].versions


@pytest.mark.parametrize("in_flight", ["finish", "continue", "recompute"])
def test_pinned_evaluation_keeps_its_policy_while_serving_moves_on(qwen, finish_all, in_flight):
    engine, _ = start(qwen, steps=2, slots=5)
    old = qwen.policy(0)[0]
    pinned = [qwen.request(10 + i, length=4, new=15, temperature=i / 2, policy=old) for i in range(4)]
    for request in pinned:
        engine.submit(request)
    assert engine.resident[old] == 3 + 4
    engine.step()
    engine.flip(qwen.policy(1)[0], in_flight)
    with pytest.raises(EngineError, match="used by"):
        engine.evict(old)
    done = finish_all(engine)
    for request in pinned:
        completion = done[request.key[1]]
        assert completion.versions == runs(qwen, (0, 15))
        check_logprobs(qwen, request, completion, 0)
    engine.evict(old)
    assert engine.resident == {qwen.policy(1)[0]: 0}


def test_rebind_moves_only_the_unpinned_requests_of_that_policy(qwen, finish_all):
    engine, requests = start(qwen, steps=3, slots=6)
    old, new = qwen.policy(0)[0], qwen.policy(1)[0]
    pinned = qwen.request(9, length=4, new=15, policy=old)
    engine.submit(pinned)
    assert engine.rebind(old) == 0  # it serves
    engine.flip(new, "finish")
    engine.step()
    assert engine.rebind(old) == 3
    assert engine.resident == {old: 1, new: 3}
    done = finish_all(engine)
    assert done[9].versions == runs(qwen, (0, 15))
    for i, request in enumerate(requests):
        assert [run.version for run in done[i].versions] == [0, 1]
        flip = done[i].versions[0].count
        np.testing.assert_allclose(
            done[i].logprobs[flip:], qwen.logprobs(1, request.prompt, done[i].tokens, 1.0)[flip:], atol=1e-5
        )


def test_nothing_runs_before_the_first_flip(qwen, finish_all):
    engine = qwen.engine(versions=())
    engine.submit(qwen.request(0))
    assert engine.step() == []
    assert engine.serving is None
    engine.install(*qwen.policy(0))
    assert engine.step() == []
    engine.flip(qwen.policy(0)[0], "finish")
    assert finish_all(engine)[0].versions == runs(qwen, (0, 8))


def test_an_ended_policy_may_be_evicted_while_others_run(qwen, finish_all):
    """Rows of the old policy that have ended but were not yet reused must not ask for its weights."""
    engine = qwen.engine(versions=(0, 1), slots=20)
    old, new = qwen.policy(0)[0], qwen.policy(1)[0]
    engine.submit(qwen.request(0, new=4, policy=old))
    requests = [qwen.request(i, new=25, policy=new) for i in range(1, 20)]
    for request in requests:
        engine.submit(request)
    engine.flip(new, "finish")
    while engine.resident[old]:
        engine.step()
    engine.evict(old)
    engine.install(*qwen.policy(2))
    done = finish_all(engine)
    for request in requests:
        check_logprobs(qwen, request, done[request.key[1]], 1)


def test_abort_returns_what_was_sampled_and_frees_policy_and_slot(qwen, finish_all):
    engine, requests = start(qwen, steps=4, slots=3)
    waiting = qwen.request(5)
    engine.submit(waiting)
    engine.abort(requests[1].key)
    engine.abort(waiting.key)
    engine.abort((99, 99))
    assert engine.resident[qwen.policy(0)[0]] == 2
    assert (engine.free_slots, engine.active) == (1, 4)
    aborted = {completion.key: completion for completion in engine.step() if completion.finish == "abort"}
    assert aborted.keys() == {requests[1].key, waiting.key}
    assert len(aborted[waiting.key].tokens) == 0
    assert aborted[waiting.key].versions == ()
    assert aborted[requests[1].key].versions == runs(qwen, (0, 5))
    check_logprobs(qwen, requests[1], aborted[requests[1].key], 0)
    done = finish_all(engine)
    for i in (0, 2):
        check_logprobs(qwen, requests[i], done[i], 0)


def test_a_key_cannot_be_submitted_twice_until_it_is_back(qwen, finish_all):
    engine = qwen.engine()
    engine.submit(qwen.request(0))
    with pytest.raises(EngineError, match="already submitted"):
        engine.submit(qwen.request(0))
    finish_all(engine)
    engine.submit(qwen.request(0))
    assert len(finish_all(engine)) == 1


def broken_adapters(qwen):
    """(name, tensors, config, what the message must say): each wrong in one way."""
    tensors, config = qwen.tensors(seed=5), qwen.config()
    a = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    b = a.replace("lora_A", "lora_B")
    without = {name: tensor for name, tensor in tensors.items() if name != b}
    neither = {name: tensor for name, tensor in without.items() if name != a}
    yield "no B", without, config, "layers.1.mlp.up_proj has no lora_B"
    yield "no module", neither, config, "layers.1.mlp.up_proj has no lora_A"
    yield "misnamed", neither | {a.replace("up_proj", "upp_proj"): tensors[a], b: tensors[b]}, config, "upp_proj"
    yield "no prefix", neither | {a.removeprefix("base_model."): tensors[a], b: tensors[b]}, config, "not named"
    yield "transposed", tensors | {a: tensors[a].T.contiguous()}, config, "has shape"
    yield "another rank", tensors, qwen.config(r=8), "has shape"
    yield "not finite", tensors | {a: tensors[a] * torch.nan}, config, "finite"
    yield "untargeted", tensors, qwen.config(target_modules=[t for t in qwen.targets if t != "up_proj"]), "not among"
    yield "unknown target", tensors, qwen.config(target_modules=[*qwen.targets, "router"]), "'router'"


def test_a_wrong_adapter_is_refused_by_name_and_the_old_one_keeps_serving(qwen, finish_all):
    engine, requests = start(qwen, steps=3)
    good = dict(engine.resident)
    cases = list(broken_adapters(qwen))
    assert len(cases) == 9
    for name, tensors, config, message in cases:
        policy, path = qwen.write(9, tensors, config)
        with pytest.raises(EngineError) as error:
            engine.install(policy, path)
        assert message in str(error.value), name
        assert engine.resident == good
        with pytest.raises(EngineError, match="not resident"):
            engine.flip(policy, "continue")
    other, path = qwen.policy(2)[0], qwen.policy(1)[1]
    with pytest.raises(EngineError, match="digest"):
        engine.install(other, path)
    path = path.with_name("cut.safetensors")
    path.write_bytes(qwen.policy(2)[1].read_bytes()[:-100])
    with pytest.raises(EngineError, match="cannot be read"):
        engine.install(other, path)
    assert engine.serving == qwen.policy(0)[0]
    done = finish_all(engine)
    for i, request in enumerate(requests):
        check_logprobs(qwen, request, done[i], 0)


def test_install_reports_the_modules_and_is_idempotent(qwen):
    engine = qwen.engine(versions=())
    installed = engine.install(*qwen.policy(0))
    assert installed.matched_modules == tuple(sorted(qwen.linears))
    assert len(installed.matched_modules) == 14
    assert engine.install(*qwen.policy(0)) == installed
    assert engine.resident == {qwen.policy(0)[0]: 0}


def test_a_slot_is_needed_to_install_and_is_reused_after_evict(qwen, finish_all):
    engine = qwen.engine(versions=(0, 1), max_resident=2)
    with pytest.raises(EngineError, match="all 2 policy slots are taken"):
        engine.install(*qwen.policy(2))
    with pytest.raises(EngineError, match="serving"):
        engine.evict(qwen.policy(0)[0])
    engine.evict(qwen.policy(1)[0])
    engine.install(*qwen.policy(2))
    engine.flip(qwen.policy(2)[0], "recompute")
    engine.submit(qwen.request(0))
    check_logprobs(qwen, qwen.request(0), finish_all(engine)[0], 2)


def test_a_policy_that_targets_fewer_modules_leaves_no_trace_of_the_one_before_it(qwen):
    engine = qwen.engine(versions=(0, 1), max_resident=2)
    engine.evict(qwen.policy(1)[0])
    tensors = {name: tensor for name, tensor in qwen.tensors(seed=3).items() if "q_proj" in name}
    policy, path = qwen.write(4, tensors, qwen.config(target_modules=["q_proj"]))
    assert len(engine.install(policy, path).matched_modules) == 2
    fresh = qwen.engine(versions=())
    fresh.install(policy, path)
    sequence = qwen.prompt(0, 12)
    assert engine.score(policy, [sequence])[0].tolist() == fresh.score(policy, [sequence])[0].tolist()


def test_an_adapter_with_zero_b_is_the_base_model(qwen):
    tensors = {name: tensor * (0 if "lora_B" in name else 1) for name, tensor in qwen.tensors(seed=3).items()}
    policy, path = qwen.write(0, tensors, qwen.config())
    engine = qwen.engine(versions=())
    engine.install(policy, path)
    sequence = qwen.prompt(0, 12)
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(qwen.path)(input_ids=ids).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    # Two programs' roundings apart, as everywhere here: on one CPU 1.4e-6.
    np.testing.assert_allclose(engine.score(policy, [sequence])[0], expected.numpy(), atol=1e-5)


def test_in_bfloat16_scores_equal_those_of_peft(qwen, finish_all):
    engine = qwen.engine(versions=(0, 1), dtype="bfloat16")
    base = AutoModelForCausalLM.from_pretrained(qwen.path, dtype=torch.bfloat16)
    qwen.oracle(1)  # writes the adapter's folder
    oracle = PeftModel.from_pretrained(base, qwen.folder / "peft-1").eval()
    sequence = qwen.prompt(0, 40)
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    with torch.no_grad():
        logits = oracle(input_ids=ids, use_cache=False).logits[0, :-1].float()
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    policy = qwen.policy(1)[0]
    scores = engine.score(policy, [sequence])[0]
    # Both round to bfloat16 in the same places; attention may sum in another order.
    assert np.abs(scores - expected).mean() < 0.05
    assert np.abs(scores - engine.score(qwen.policy(0)[0], [sequence])[0]).mean() > 0.5
    engine.submit(qwen.request(0, policy=policy))
    got = finish_all(engine)[0]
    whole = engine.score(policy, [np.concatenate([qwen.prompt(0, 5), got.tokens])])[0]
    assert np.abs(got.logprobs - whole[4:]).mean() < 0.05


def test_in_bfloat16_an_update_below_the_weights_resolution_reaches_the_output():
    """W = 1 everywhere and x alternates in sign, so W·x = 0; the update is 2^-10, which 1 + 2^-10 would lose."""
    weight = torch.nn.Parameter(torch.ones(3, 16, dtype=torch.bfloat16), requires_grad=False)
    layer = UnmergedLinear(weight, None, ActiveSlot(), slots=1)
    a = torch.zeros(1, 16)
    a[0, ::2] = 1.0
    layer.load(0, LowRank(a, torch.full((3, 1), 2.0**-11), scale=2.0))
    x = torch.tensor([1.0, -1.0] * 8, dtype=torch.bfloat16)
    assert layer(x).tolist() == [8 * 2.0**-10] * 3
    layer.load(0, None)
    assert layer(x).tolist() == [0.0] * 3


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, None, 0, 1, 2])),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("flip"), st.integers(0, 2), st.sampled_from(["finish", "continue", "recompute"])),
        st.tuples(st.just("rebind"), st.integers(0, 2)),
        st.tuples(st.just("evict"), st.integers(0, 2)),
        st.tuples(st.just("install"), st.integers(0, 2)),
    ),
    min_size=8,
    max_size=30,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_any_order_of_calls_balances_references_and_returns_every_request_once(qwen, shared_engine, actions):
    engine = shared_engine
    submitted, returned = [], []

    def attempt(call, *arguments):
        try:
            return call(*arguments)
        except EngineError:
            return None

    for action in actions:
        match action:
            case ("submit", length, new, version):
                policy = None if version is None else qwen.policy(version)[0]
                request = qwen.request(len(submitted), length=length, new=new, policy=policy)
                if policy is None or policy in engine.resident:
                    engine.submit(request)
                    submitted.append(request)
            case ("step",):
                returned += engine.step()
            case ("abort", sample):
                engine.abort((7, sample))
            case ("flip", version, in_flight):
                attempt(engine.flip, qwen.policy(version)[0], in_flight)
            case ("install", version):
                attempt(engine.install, *qwen.policy(version))
            case (name, version):
                attempt(getattr(engine, name), qwen.policy(version)[0])
        assert len(engine.resident) <= 2
        assert min(engine.resident.values(), default=0) >= 0
        assert engine.serving is None or engine.serving in engine.resident
        assert sum(engine.resident.values()) <= engine.active
    if engine.serving is None:
        engine.install(*qwen.policy(0))
        engine.flip(qwen.policy(0)[0], "finish")
    while engine.active:
        returned += engine.step()
    assert sorted(completion.key for completion in returned) == [request.key for request in submitted]
    assert set(engine.resident.values()) == {0}
    assert engine.free_slots == 3
    for completion in returned:
        assert sum(run.count for run in completion.versions) == len(completion.tokens) == len(completion.logprobs)
        request = submitted[completion.key[1]]
        if len({run.version for run in completion.versions}) == 1:
            check_logprobs(qwen, request, completion, completion.versions[0].version)
        if request.policy is not None:
            assert {run.digest for run in completion.versions} <= {request.policy.digest}


@pytest.fixture(scope="module")
def shared_engine(qwen):
    """One engine for all examples: each starts from what the last one left, idle but with policies resident."""
    return qwen.engine(versions=(), slots=3, max_resident=2)


def test_an_unknown_policy_is_named_with_those_that_are_resident(qwen):
    engine = qwen.engine()
    with pytest.raises(EngineError, match=qwen.policy(0)[0].short()) as error:
        engine.submit(qwen.request(0, policy=PolicyId("main", 5, "f" * 64)))
    assert "5-ffffffff" in str(error.value)
    assert engine.active == 0


def test_it_says_when_the_first_token_was_sampled_under_a_policy_and_forgets_with_the_policy(qwen):
    engine = qwen.engine(versions=(0, 1))
    (old, _), (new, _) = qwen.policy(0), qwen.policy(1)
    assert engine.first_token(old) is None
    before = time.monotonic()
    for sample in range(2):
        engine.submit(qwen.request(sample, new=6))
    engine.step()
    first = engine.first_token(old)
    assert before <= first <= time.monotonic()
    engine.flip(new, "finish")
    engine.step()
    assert engine.first_token(new) is None
    engine.submit(qwen.request(2, new=6))
    flipped = time.monotonic()
    for _ in range(6):
        engine.step()
    assert engine.first_token(new) >= flipped
    assert engine.first_token(old) == first
    while engine.active:
        engine.step()
    engine.evict(old)
    assert engine.first_token(old) is None

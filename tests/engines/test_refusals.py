"""What is wrong is refused by name, before it reaches what serves, and what serves goes on."""

from __future__ import annotations

import numpy as np
import pytest
from engine_house import CLOSE, CONTEXT, DECLARES, LONG, Bed
from served_model import VOCABULARY, broken_adapters

from async_rl.inference_config import SERVES_EXPERTS
from async_rl.wire.messages import SamplingParams
from inference.engine import EngineError, Request


def test_what_an_engine_declares_is_what_it_is_tested_for(adapters: Bed) -> None:
    assert_declared(adapters)


@pytest.mark.needs("continue")
def test_what_an_engine_that_continues_declares_is_what_it_is_tested_for(continuing: Bed) -> None:
    assert_declared(continuing)


def test_what_an_engine_of_whole_weights_declares_is_what_it_is_tested_for(whole: Bed) -> None:
    assert_declared(whole)


def assert_declared(bed: Bed) -> None:
    offered, tested = bed.engine.capabilities, DECLARES[bed.name][bed.kind]
    assert offered.in_flight == tested & {"finish", "continue", "recompute"}
    assert offered.attests in tested
    assert offered.top_p == ("top_p" in tested)
    assert offered.in_place == bed.kind.whole
    assert offered.experts == (bed.name in SERVES_EXPERTS and not bed.kind.whole)
    assert offered.name == bed.name
    assert bed.engine.vocabulary_size == VOCABULARY


def test_a_wrong_adapter_is_refused_by_name_and_what_serves_goes_on(adapters: Bed) -> None:
    request = adapters.model.request(0, length=140, new=LONG)
    adapters.begin([request])
    cases = broken_adapters(adapters.model)
    for what, tensors, config, message in cases:
        policy, path = adapters.model.write(9, tensors, config)
        with pytest.raises(EngineError) as error:
            adapters.engine.install(policy, path)
        assert message in str(error.value), what
        assert adapters.uses() == {0: 1}
        with pytest.raises(EngineError, match="not resident"):
            adapters.engine.flip(policy, "finish")
    done = adapters.finish()
    assert done[0].versions == adapters.runs((0, LONG))
    adapters.assert_sampled_by(0, request, done[0])


def test_an_adapter_that_is_another_or_cut_off_is_refused(adapters: Bed) -> None:
    two, path = adapters.model.policy(2)
    with pytest.raises(EngineError, match="digest"):
        adapters.engine.install(two, adapters.model.policy(1)[1])
    cut = path.with_name("cut.safetensors")
    cut.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match="cannot be read"):
        adapters.engine.install(two, cut)
    assert adapters.uses() == {0: 0}


def test_install_reports_every_module_and_again_does_nothing(adapters: Bed) -> None:
    installed = adapters.engine.install(*adapters.model.policy(1))
    assert installed.matched_modules == tuple(sorted(adapters.model.linears))
    assert adapters.engine.install(*adapters.model.policy(1)) == installed
    assert adapters.uses() == {0: 0, 1: 0}


def test_an_adapter_of_fewer_modules_leaves_no_trace_of_the_one_whose_place_it_has(adapters: Bed) -> None:
    model = adapters.model
    adapters.install(1)
    adapters.engine.evict(model.policy(1)[0])
    tensors = {name: tensor for name, tensor in model.tensors(seed=3).items() if "q_proj" in name}
    policy, path = model.write(4, tensors, model.config(target_modules=["q_proj"]))
    assert len(adapters.engine.install(policy, path).matched_modules) == 2
    tokens = model.prompt(0, 40)
    expected = model.logprobs_with(tensors, model.config(target_modules=["q_proj"]), tokens[:1], tokens[1:])
    np.testing.assert_allclose(adapters.engine.score(policy, [tokens])[0], expected, atol=CLOSE, rtol=0)


def test_an_adapter_that_is_scaled_by_the_root_of_its_rank_is_right_or_refused(adapters: Bed) -> None:
    model = adapters.model
    tensors, config = model.tensors(seed=6), model.config(use_rslora=True)
    policy, path = model.write(5, tensors, config)
    if adapters.name == "sglang":
        with pytest.raises(EngineError, match="rslora"):
            adapters.engine.install(policy, path)
        return
    adapters.engine.install(policy, path)
    tokens = model.prompt(0, 40)
    expected = model.logprobs_with(tensors, config, tokens[:1], tokens[1:])
    np.testing.assert_allclose(adapters.engine.score(policy, [tokens])[0], expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("bad", [VOCABULARY, VOCABULARY + 1000, -1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused_and_what_runs_goes_on(adapters: Bed, bad: int) -> None:
    request = adapters.model.request(0, new=LONG)
    adapters.begin([request])
    prompt = np.array([3, bad, 5], dtype=np.int32)
    with pytest.raises(EngineError, match=f"4/2.*{bad}"):
        adapters.engine.submit(Request((4, 2), prompt, SamplingParams(1.0, 4), 0))
    with pytest.raises(EngineError, match=str(bad)):
        adapters.engine.score(adapters.model.policy(0)[0], [prompt])
    assert adapters.engine.active == 1
    done = adapters.finish()
    adapters.assert_sampled_by(0, request, done[0])


@pytest.mark.parametrize(
    ("length", "sampling", "message"),
    [
        (0, SamplingParams(1.0, 4), "empty"),
        (CONTEXT, SamplingParams(1.0, 4), "no room"),
        (3, SamplingParams(1e-6, 4), "temperature"),
        (3, SamplingParams(-1.0, 4), "temperature"),
        (3, SamplingParams(1.0, 0), "max_new_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    adapters: Bed, length: int, sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(EngineError, match=message) as error:
        adapters.engine.submit(Request((4, 2), adapters.model.prompt(0, length), sampling, 0))
    assert "4/2" in str(error.value)
    assert adapters.engine.active == 0


def test_a_prompt_as_long_as_can_be_gets_its_one_token(adapters: Bed) -> None:
    request = adapters.model.request(0, length=CONTEXT - 1, new=9)
    done = adapters.run([request])
    assert (len(done[0].tokens), done[0].finish) == (1, "length")
    adapters.assert_sampled_by(0, request, done[0])


def test_a_policy_that_is_not_resident_cannot_be_pinned_served_or_scored(adapters: Bed) -> None:
    policy = adapters.model.policy(7)[0]
    with pytest.raises(EngineError, match="not resident"):
        adapters.engine.submit(adapters.model.request(0, policy=policy))
    with pytest.raises(EngineError, match="not resident"):
        adapters.engine.flip(policy, "finish")
    with pytest.raises(EngineError, match="not resident"):
        adapters.engine.score(policy, [adapters.model.prompt(0, 4)])
    assert adapters.engine.active == 0


def test_a_key_cannot_be_submitted_twice_until_it_is_back(adapters: Bed) -> None:
    request = adapters.model.request(0, new=LONG)
    adapters.begin([request])
    with pytest.raises(EngineError, match="already submitted"):
        adapters.engine.submit(request)
    adapters.finish()
    assert len(adapters.run([request])) == 1

"""What servers do, most of it in silence, when one trusts them: each trap with our guard taken away, and with it."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_house import CLOSE, Bed, Engines
from served_model import Ids, Tensors, logprobs_by, write_peft

from async_rl.wire.messages import SamplingParams
from inference.engine import EngineError, Request
from inference.served_attempt import label_of
from inference.server import EngineDied

APART = 0.05  # nats; rounding is less than a hundredth of that, and policies are tenths and more apart
BLOCKS = 400  # tokens of a prompt: several cache blocks


def off(bed: Bed, adapter: str | None, oracle: torch.nn.Module, prompt: Ids, cache_key: str) -> float:
    """How far the server's log-probabilities of what it samples are from the oracle's, at most."""
    tokens, logprobs = bed.sample(bed.call(prompt, adapter, cache_key))
    return float(np.abs(logprobs_by(oracle, prompt, tokens) - logprobs).max())


# --- the stale prefix ------------------------------------------------------------------------------------------------


@pytest.mark.only("vllm")
def test_an_adapter_under_a_used_name_and_path_and_key_answers_from_the_old_ones_cache(adapters: Bed) -> None:
    """vLLM's prefix cache knows an adapter by its name and path. Either another name, or another key, is enough."""
    model, prompt = adapters.model, adapters.model.prompt(3, BLOCKS)
    new = model.oracle(1)
    adapters.ask(adapters.server.load("used", model.peft_folder(0, "used")))
    assert off(adapters, "used", model.oracle(0), prompt, "key") < CLOSE
    adapters.ask(adapters.server.unload("used"))
    adapters.ask(adapters.server.load("used", model.peft_folder(1, "used")))
    assert off(adapters, "used", new, prompt, "key") > APART
    assert off(adapters, "used", new, prompt, "another key") < CLOSE
    adapters.ask(adapters.server.unload("used"))
    adapters.ask(adapters.server.load("unused", model.peft_folder(1, "unused")))
    assert off(adapters, "unused", new, prompt, "key") < CLOSE
    adapters.ask(adapters.server.unload("unused"))


@pytest.mark.needs("process")
def test_weights_that_are_loaded_while_the_key_stays_answer_from_the_old_ones_cache(
    whole: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache cannot be dropped while requests go on with it, so it stays, and keys count how often weights came."""
    prompt = whole.model.prompt(3, BLOCKS)
    assert off(whole, None, whole.model.plain(whole.updates.tensors()), prompt, "key") < CLOSE
    file = whole.updates.step()
    new = whole.model.plain(whole.updates.tensors())
    new.save_pretrained(tmp_path)  # type: ignore[operator]
    counter = {"vllm": "_changes", "sglang": "_reloads"}[whole.name]
    before = getattr(whole.server, counter)
    whole.ask(whole.server.reload(tmp_path, label_of(file.policy)))
    with monkeypatch.context() as unguarded:
        unguarded.setattr(whole.server, counter, before)
        assert off(whole, None, new, prompt, "key") > APART
    assert off(whole, None, new, prompt, "key") < CLOSE
    whole.serve_files([file])
    done = whole.run([whole.model.request(0, new=8)._replace(prompt=prompt)])
    assert np.abs(logprobs_by(new, prompt, done[0].tokens) - done[0].logprobs).max() < CLOSE


# --- the unload that blocks ------------------------------------------------------------------------------------------


@pytest.mark.only("sglang")
def test_to_unload_what_a_request_uses_holds_up_every_later_load(adapters: Bed) -> None:
    """Unguarded it waits for the request, and the next load for it; ours says no, or waits where nobody is held up."""
    model = adapters.model
    adapters.ask(adapters.server.load("busy", model.peft_folder(0)))
    call = adapters.call(model.prompt(3, 20), "busy", "key", most=480)
    running = adapters.begin_call(call)
    unloading = adapters.start(adapters.server._control("/unload_lora_adapter", {"lora_name": "busy"}))
    assert not ended(unloading)
    loading = adapters.start(adapters.server.load("late", model.peft_folder(1)))
    assert not ended(loading)
    assert not running.done()
    adapters.ask(adapters.server.abort(call.name))
    for waits in (unloading, loading, running):
        waits.result(60.0)

    call = adapters.call(model.prompt(4, 20), "late", "key", most=480)
    running = adapters.begin_call(call)
    unloading = adapters.start(adapters.server.unload("late"))
    loading = adapters.start(adapters.server.load("later", model.peft_folder(2)))
    loading.result(60.0)
    assert not running.done()
    adapters.ask(adapters.server.abort(call.name))
    unloading.result(60.0)
    adapters.ask(adapters.server.unload("later"))


def ended(work: concurrent.futures.Future[object]) -> bool:
    """Within fifty times as long as a load takes here."""
    return bool(concurrent.futures.wait([work], 0.5).done)


@pytest.mark.needs("process")
def test_evict_refuses_what_a_request_uses_and_takes_no_time_once_it_is_aborted(adapters: Bed) -> None:
    old = adapters.model.policy(0)[0]
    request = adapters.model.request(0, new=400)
    adapters.begin([request])
    adapters.serve(1, "finish")
    with pytest.raises(EngineError, match="used by 1"):
        adapters.engine.evict(old)
    adapters.engine.abort(request.key)
    adapters.engine.evict(old)
    adapters.install(2)
    assert adapters.uses() == {1: 0, 2: 0}


# --- the name that matches nothing -----------------------------------------------------------------------------------


@pytest.mark.only("vllm")
def test_an_adapter_for_layers_that_are_not_there_is_loaded_in_silence_and_does_nothing(adapters: Bed) -> None:
    model, prompt = adapters.model, adapters.model.prompt(4, 30)
    tensors = {name.replace("layers.", "layers.7"): tensor for name, tensor in model.tensors(5).items()}
    adapters.ask(adapters.server.load("nothing", write_peft(model.folder / "nothing", tensors, model.config())))
    assert off(adapters, "nothing", model.oracle(None), prompt, "key") < CLOSE
    adapters.ask(adapters.server.unload("nothing"))
    assert_refused(adapters, tensors, "layers.7")


def misnamed(bed: Bed) -> Tensors:
    return {name.replace("_proj", "_prog"): tensor for name, tensor in bed.model.tensors(5).items()}


def assert_refused(bed: Bed, tensors: Tensors, message: str) -> None:
    """By the engine, which looks first; and it goes on."""
    policy, path = bed.model.write(9, tensors, bed.model.config())
    with pytest.raises(EngineError, match=message):
        bed.engine.install(policy, path)
    request = bed.model.request(0)
    bed.assert_sampled_by(0, request, bed.run([request])[0])


@pytest.mark.only("sglang")
def test_an_adapter_whose_names_match_nothing_is_loaded_and_its_first_request_ends_the_server(
    adapters: Bed, engines: Engines
) -> None:
    assert_refused(adapters, misnamed(adapters), "_prog")
    folder = write_peft(adapters.model.folder / "misnamed", misnamed(adapters), adapters.model.config())
    adapters.ask(adapters.server.load("misnamed", folder))
    with pytest.raises(EngineDied):
        adapters.sample(adapters.call(adapters.model.prompt(0, 20), "misnamed", "key"))
    engines.close()


# --- the id that ends the server -------------------------------------------------------------------------------------


@pytest.mark.needs("process")
def test_an_id_outside_the_vocabulary_ends_the_server(
    adapters: Bed, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = adapters
    prompt = np.array([3, 1 << 20, 5], dtype=np.int32)
    with pytest.raises(EngineError, match=f"4/2.*{1 << 20}"):
        bed.engine.submit(Request((4, 2), prompt, SamplingParams(1.0, 4), 0))
    request = bed.model.request(0)
    bed.assert_sampled_by(0, request, bed.run([request])[0])

    if engines.name == "sglang":
        monkeypatch.setattr("inference.sglang_engine.check_ids", lambda *_: None)
    with pytest.raises(EngineDied):
        bed.sample(bed.call(prompt, None, "key"))
    bed.death()
    engines.close()

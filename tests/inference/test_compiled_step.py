"""The compiled decode step: it keeps every promise of the eager one, comes when it pays, and is done without where it
cannot be had. The packages are really built; each takes half a minute of a core, once in this file."""

from __future__ import annotations

import logging
import os
import shutil
import time

import numpy as np
import pytest

import inference.compiled_step as compiled_step
from async_rl.version import VersionRun
from inference.compiled_build import Build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

# Of mistral: a window on every layer, no norms of queries and keys.
KINDS = ["qwen3", pytest.param("mistral", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this file's own, so that something is built."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNC_RL_CACHE", str(folder))
        yield folder


@pytest.fixture
def compiled(cache, tiny_model):
    """Makes engines with a compiled step, of the kinds of model given to it."""

    def make(kind="qwen3", versions=(0,), **changes):
        return tiny_model(kind).engine(versions=versions, compile_mode="always", **changes)

    return make


def decode_of(engine):
    return engine.describe()["decode"]


def check_logprobs(tiny, request, completion, version, part=slice(None)):
    expected = tiny.logprobs(version, request.prompt, completion.tokens, request.sampling.temperature)
    np.testing.assert_allclose(completion.logprobs[part], expected[part], atol=1e-5)


def counted(tiny, *counts):
    return tuple(VersionRun(version, tiny.policy(version)[0].digest, count) for version, count in counts)


def ragged(tiny, count, **changes):
    return [
        tiny.request(i, length=1 + 3 * i % 11, new=9 + i, temperature=(1.0, 0.6, 1.7, 0.0)[i % 4], **changes)
        for i in range(count)
    ]


def submit_all(engine, requests):
    for request in requests:
        engine.submit(request)


def test_auto_samples_on_while_it_compiles_and_changes_over(cache, qwen, finish_all, monkeypatch):
    """Two engines at once, as two nodes of a run would be: they wait for one package."""
    monkeypatch.setattr(compiled_step, "BUILD_S", 0.0)
    engines = [qwen.engine(slots=4), qwen.engine(slots=4)]
    assert [decode_of(engine) for engine in engines] == ["eager", "eager"]
    finished, requests = [], []
    deadline = time.monotonic() + 850
    while not all(decode_of(engine).startswith("compiled") for engine in engines):
        assert time.monotonic() < deadline
        for engine in engines:
            assert decode_of(engine).startswith(("eager", "compiled"))
            if engine.active < 4:
                requests.append(qwen.request(len(requests), length=4, new=30))
                engine.submit(requests[-1])
            finished += engine.step()
        time.sleep(0.1)  # leave the core to the compiler
    assert len(finished) > 10
    assert len(list((cache / "compiled").glob("*.pt2"))) == 1
    for engine in engines:
        finished += finish_all(engine).values()
    assert len(finished) == len(requests)
    for completion in finished[-8:]:  # most were under way at the change
        check_logprobs(qwen, requests[completion.key[1]], completion, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_recompute_and_tokens_those_of_the_eager_step(kind, compiled, tiny_model, finish_all):
    tiny = tiny_model(kind)
    engine, eager = compiled(kind), tiny.engine(compile_mode="never")
    requests = ragged(tiny, 9)
    submit_all(engine, requests)
    submit_all(eager, requests)
    done, expected = finish_all(engine), finish_all(eager)
    assert decode_of(engine).startswith("compiled")
    assert decode_of(eager) == "eager"
    for i, request in enumerate(requests):
        assert done[i].tokens.tolist() == expected[i].tokens.tolist()
        assert done[i].versions == counted(tiny, (0, 9 + i))
        check_logprobs(tiny, request, done[i], 0)


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(compiled, qwen, finish_all):
    request = qwen.request(3, length=6, new=20)
    alone, crowd = compiled(slots=1), compiled(slots=6)
    alone.submit(request)
    submit_all(crowd, [request if i == 3 else qwen.request(i, length=2 + i, new=3 + 2 * i) for i in range(14)])
    got, expected = finish_all(crowd)[3], finish_all(alone)[3]
    assert got.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_two_policies_at_once_leave_each_others_requests_alone(compiled, qwen, finish_all):
    engine = compiled(versions=(0, 1), slots=5)
    policies = [qwen.policy(0)[0], qwen.policy(1)[0]]
    requests = [qwen.request(i, length=2 + i % 7, new=3 + i * 5 % 17, policy=policies[i % 2]) for i in range(16)]
    submit_all(engine, requests)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        assert done[i].versions == counted(qwen, (i % 2, len(done[i].tokens)))
        check_logprobs(qwen, request, done[i], i % 2)


@pytest.mark.parametrize("in_flight", ["finish", "continue", "recompute"])
def test_a_flip_in_flight_is_what_it_is_for_the_eager_step(in_flight, compiled, qwen, finish_all):
    engine = compiled(versions=(0, 1))
    requests = [qwen.request(i, length=3 + 2 * i, new=14 + i) for i in range(3)]
    submit_all(engine, requests)
    for _ in range(4):
        assert engine.step() == []
    engine.flip(qwen.policy(1)[0], in_flight)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        if in_flight == "finish":
            assert done[i].versions == counted(qwen, (0, 14 + i))
            check_logprobs(qwen, request, done[i], 0)
            continue
        assert done[i].versions == counted(qwen, (0, 5), (1, 9 + i))
        check_logprobs(qwen, request, done[i], 0, slice(0, 5))
        fresh = qwen.logprobs(1, request.prompt, done[i].tokens, 1.0)[5:]
        # Under continue the KV cache of version 0 stays, so what follows is neither policy's own distribution.
        assert (np.abs(fresh - done[i].logprobs[5:]).max() < 1e-5) == (in_flight == "recompute")


def test_weights_loaded_into_a_slot_that_was_used_before_are_the_ones_computed_with(compiled, qwen, finish_all):
    engine = compiled(versions=(0, 1), max_resident=2)
    engine.submit(qwen.request(0))
    finish_all(engine)
    engine.flip(qwen.policy(1)[0], "finish")
    engine.evict(qwen.policy(0)[0])
    engine.install(*qwen.policy(2))
    engine.flip(qwen.policy(2)[0], "finish")
    requests = [qwen.request(1 + i) for i in range(2)]
    submit_all(engine, requests)
    done = finish_all(engine)
    assert decode_of(engine).startswith("compiled")
    for request in requests:
        check_logprobs(qwen, request, done[request.key[1]], 2)


def test_an_aborted_request_carries_what_was_sampled(compiled, qwen, finish_all):
    engine = compiled()
    requests = [qwen.request(i, new=20) for i in range(3)]
    submit_all(engine, requests)
    for _ in range(5):
        engine.step()
    engine.abort(requests[1].key)
    done = finish_all(engine)
    assert [done[i].finish for i in range(3)] == ["length", "abort", "length"]
    assert len(done[1].tokens) == 6
    for i in range(3):
        check_logprobs(qwen, requests[i], done[i], 0)


def test_a_request_that_moves_to_another_engine_says_what_it_would_have_said(compiled, qwen, finish_all):
    whole, first, second = compiled(), compiled(), compiled(slots=3)
    requests = ragged(qwen, 4)
    submit_all(whole, requests)
    submit_all(first, requests)
    second.submit(qwen.request(9, length=4, new=20))
    for _ in range(4):
        first.step()
        second.step()
    prefixes = [first.take_out(request.key) for request in requests]
    submit_all(second, [request._replace(prefix=prefix) for request, prefix in zip(requests, prefixes, strict=True)])
    done, expected = finish_all(second), finish_all(whole)
    for i in range(4):
        assert decode_of(second).startswith("compiled")
        assert (done[i].tokens.tolist(), done[i].resumed) == (expected[i].tokens.tolist(), 5)
        np.testing.assert_allclose(done[i].logprobs, expected[i].logprobs, atol=1e-5)


@pytest.mark.long  # a package of its own
def test_in_bfloat16_adapters_kept_apart_are_compiled_too(compiled, qwen, finish_all):
    engine = compiled(versions=(0, 1), dtype="bfloat16")
    submit_all(engine, [qwen.request(i, policy=qwen.policy(i % 2)[0]) for i in range(4)])
    done = finish_all(engine)
    assert decode_of(engine).startswith("compiled")
    for i in range(4):
        whole = np.concatenate([qwen.prompt(i, 5), done[i].tokens])
        scores = engine.score(qwen.policy(i % 2)[0], [whole])[0][4:]
        assert np.abs(scores - done[i].logprobs).mean() < 0.05


# --- without ---------------------------------------------------------------------------------------------------------


def served(engine, tiny, finish_all):
    requests = [tiny.request(i) for i in range(3)]
    submit_all(engine, requests)
    done = finish_all(engine)
    for i, request in enumerate(requests):
        check_logprobs(tiny, request, done[i], 0)
    return decode_of(engine)


def test_without_a_cpp_compiler_it_stays_eager_and_says_so_once(qwen, finish_all, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(compiled_step, "BUILD_S", 0.0)
    engine = qwen.engine()
    deadline = time.monotonic() + 500
    with caplog.at_level(logging.WARNING, "engine"):
        while "not compiled" not in served(engine, qwen, finish_all):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        served(engine, qwen, finish_all)
    assert "C++ compiler" in decode_of(engine)
    (record,) = caplog.records
    assert "stays eager" in record.getMessage()


def test_a_package_that_cannot_be_loaded_is_named_and_done_without(cache, qwen, finish_all, tmp_path, monkeypatch):
    shutil.copytree(cache / "compiled", tmp_path / "compiled")
    packages = list((tmp_path / "compiled").glob("*.pt2"))
    for package in packages:
        package.write_bytes(b"not a package")
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    said = served(qwen.engine(compile_mode="always"), qwen, finish_all)
    assert said.startswith("eager, not compiled: ")
    assert any(str(package) in said for package in packages)


def test_a_package_that_computes_something_else_is_refused(compiled, qwen, finish_all, monkeypatch):
    right = compiled_step.decode_step.decode_step

    def otherwise(shape, *arguments):
        return right(shape._replace(eps=0.1), *arguments)

    assert served(compiled(), qwen, finish_all).startswith("compiled")
    with monkeypatch.context() as patch:
        patch.setattr(compiled_step.decode_step, "decode_step", otherwise)
        engine = compiled()
        engine.submit(qwen.request(0))
        finish_all(engine)
        assert "log-probabilities or KV rows that are off by" in decode_of(engine)


def test_never_builds_nothing(qwen, finish_all, tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_step, "BUILD_S", 0.0)
    assert served(qwen.engine(compile_mode="never"), qwen, finish_all) == "eager"
    assert list(tmp_path.iterdir()) == []


def test_a_short_run_is_not_compiled(qwen, finish_all, tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    assert served(qwen.engine(), qwen, finish_all) == "eager"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text"])
def test_a_model_of_another_family_says_why_it_is_not_compiled(kind, tiny_model, finish_all):
    tiny = tiny_model(kind)
    engine = tiny.engine(compile_mode="always")
    assert "model type" in served(engine, tiny, finish_all)
    assert engine.describe()["forward"].startswith("transformers")


def test_closing_the_engine_ends_a_build_that_is_under_way(qwen, tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_step, "BUILD_S", 0.0)
    engine = qwen.engine()
    submit_all(engine, [qwen.request(i) for i in range(2)])
    while decode_of(engine) == "eager":
        engine.step()
    build: Build = engine._runner.forward._step._build
    engine.close()
    assert build._child.returncode is not None

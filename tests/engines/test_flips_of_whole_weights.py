"""Policies that are all of the weights: after a flip the engine is what transformers is with the weights of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_house import CLOSE, LONG, Bed, resident_bytes
from served_model import logprobs_across, logprobs_by

from async_rl.version import VersionRun
from inference.engine import EngineError, Request

FLIPS = 24
GROWTH = 24e6  # bytes; the model's weights are 0.6 MB


def oracle(bed: Bed) -> torch.nn.Module:
    """The last policy that was made."""
    return bed.model.plain(bed.updates.tensors())


def runs(bed: Bed, *counts: tuple[int, int]) -> tuple[VersionRun, ...]:
    """From pairs of how many policies back (0 is the last), and count."""
    return tuple(
        VersionRun(file.policy.version, file.policy.digest, count)
        for file, count in ((bed.updates.main[-1 - back], count) for back, count in counts)
    )


def assert_serves(bed: Bed, model: torch.nn.Module) -> None:
    """By score, and by what it samples after prompts of less than a cache block and of several."""
    sequences = [bed.model.prompt(60 + i, length) for i, length in enumerate((5, 300))]
    for sequence, score in zip(sequences, bed.engine.score(bed.updates.main[-1].policy, sequences), strict=True):
        np.testing.assert_allclose(score, logprobs_by(model, sequence[:1], sequence[1:]), atol=CLOSE, rtol=0)
    requests = [bed.model.request(i, length=length, new=10) for i, length in enumerate((5, 300))]
    done = bed.run(requests)
    for request in requests:
        completion = done[request.key[1]]
        assert completion.versions == runs(bed, (0, 10))
        expected = logprobs_by(model, request.prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=CLOSE, rtol=0)


def test_after_every_flip_log_probabilities_are_those_of_the_moved_weights(whole: Bed) -> None:
    assert_serves(whole, oracle(whole))
    for number in range(4):
        whole.serve_files([whole.updates.step(dense=number == 2, still=number == 1)])
        assert_serves(whole, oracle(whole))
    assert whole.engine.resident == {whole.updates.main[-1].policy: 0}


def test_a_snapshot_stands_alone_and_so_does_the_checkpoint(whole: Bed) -> None:
    last = oracle(whole)
    base = whole.updates.main[0]
    whole.serve_files([base])
    tokens = whole.model.prompt(4, 140)
    expected = whole.model.logprobs(None, tokens[:1], tokens[1:])
    np.testing.assert_allclose(whole.engine.score(base.policy, [tokens])[0], expected, atol=CLOSE, rtol=0)
    whole.serve_files([whole.updates.snapshot()])
    assert_serves(whole, last)
    whole.serve_files([base])
    whole.serve_files(whole.updates.main)  # the whole way, as one who joins goes it
    assert_serves(whole, last)


def test_recompute_goes_on_exactly_as_the_new_weights_would(whole: Bed) -> None:
    requests = [whole.model.request(i, length=length, new=LONG) for i, length in enumerate((5, 300))]
    old = oracle(whole)
    whole.begin(requests)
    whole.serve_files([whole.updates.step()], "recompute")
    new = oracle(whole)
    done = whole.finish()
    for request in requests:
        before = assert_two_versions(whole, request, done[request.key[1]].versions)
        for model, places in ((old, slice(before)), (new, slice(before, None))):
            expected = logprobs_by(model, request.prompt, done[request.key[1]].tokens)[places]
            np.testing.assert_allclose(done[request.key[1]].logprobs[places], expected, atol=CLOSE, rtol=0)


def test_continue_goes_on_under_the_new_weights_after_what_the_old_ones_have_read(whole: Bed) -> None:
    requests = [whole.model.request(i, length=length, new=LONG) for i, length in enumerate((5, 300))]
    old = oracle(whole)
    whole.begin(requests)
    whole.serve_files([whole.updates.step()], "continue")
    new = oracle(whole)
    done = whole.finish()
    for request in requests:
        completion = done[request.key[1]]
        before = assert_two_versions(whole, request, completion.versions)
        expected = logprobs_by(old, request.prompt, completion.tokens)[:before]
        np.testing.assert_allclose(completion.logprobs[:before], expected, atol=CLOSE, rtol=0)
        mixed = logprobs_across(old, new, request.prompt, completion.tokens, before)
        np.testing.assert_allclose(completion.logprobs[before:], mixed, atol=CLOSE, rtol=0)


def assert_two_versions(bed: Bed, request: Request, versions: tuple[VersionRun, ...]) -> int:
    """The last but one and the last; how many tokens the first of them has."""
    assert len(versions) == 2
    assert versions == runs(bed, (1, versions[0].count), (0, LONG - versions[0].count))
    return versions[0].count


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_a_request_after_a_flip_has_nothing_of_the_old_weights_cache(whole: Bed, in_flight: str) -> None:
    """Its prompt, of several blocks, was read under the old weights, and another request goes on meanwhile."""
    first, running = whole.model.request(0, length=300, new=4), whole.model.request(1, new=LONG)
    whole.run([first])
    whole.begin([running])
    whole.serve_files([whole.updates.step()], in_flight)  # type: ignore[arg-type]
    again = first._replace(key=(8, 5))
    whole.submit([again])
    done = whole.finish()
    assert done[5].versions == runs(whole, (0, 4))
    expected = logprobs_by(oracle(whole), again.prompt, done[5].tokens)
    np.testing.assert_allclose(done[5].logprobs, expected, atol=CLOSE, rtol=0)


@pytest.mark.needs("process")
def test_a_request_that_has_sampled_nothing_at_a_flip_has_nothing_of_the_old_weights_cache(whole: Bed) -> None:
    """It still waits in the server, whose cache has its prompt of before under the key that it came with."""
    first, running = whole.model.request(0, length=300, new=4), whole.model.request(1, new=LONG)
    whole.run([first])
    whole.begin([running])
    policy = whole.install_files([whole.updates.step()])
    again = first._replace(key=(8, 5))
    whole.submit([again])
    whole.send()
    whole.engine.flip(policy, "continue")
    done = whole.finish()
    assert [run.version for run in done[1].versions] == [policy.version - 1, policy.version]
    assert done[5].versions == runs(whole, (0, 4))
    expected = logprobs_by(oracle(whole), again.prompt, done[5].tokens)
    np.testing.assert_allclose(done[5].logprobs, expected, atol=CLOSE, rtol=0)


def test_what_does_not_fit_is_refused_and_what_serves_goes_on(whole: Bed) -> None:
    whole.begin([whole.model.request(0, new=LONG)])
    serving, weights = whole.engine.serving, whole.updates.copy()
    length = len(whole.updates.main)
    whole.updates.step()
    second = whole.updates.step()
    with pytest.raises(EngineError, match="changes"):
        whole.install_files([second])  # one is missing
    cut = second.path.with_name("cut.safetensors")
    cut.write_bytes(second.path.read_bytes()[:-7])
    with pytest.raises(EngineError, match="cannot be read"):
        whole.install_files([second._replace(path=cut)])
    whole.updates.back(length - 1, weights)
    assert whole.engine.serving == serving
    assert list(whole.engine.resident.values()) == [1]
    done = whole.finish()
    assert done[0].versions == runs(whole, (0, LONG))
    assert_serves(whole, oracle(whole))


def test_a_flip_waits_for_what_is_pinned_to_the_policy_that_it_would_end(whole: Bed) -> None:
    serving = whole.engine.serving
    pinned = whole.model.request(0, new=LONG, policy=serving)
    whole.begin([pinned])
    new = whole.install_files([whole.updates.step()])
    with pytest.raises(EngineError, match="pinned"):
        whole.engine.flip(new, "continue")
    with pytest.raises(EngineError, match="flip to it first"):
        whole.engine.submit(whole.model.request(1, policy=new))
    done = whole.finish()
    assert done[0].versions == runs(whole, (1, LONG))
    whole.engine.flip(new, "continue")
    assert_serves(whole, oracle(whole))


def test_many_flips_under_load_keep_no_memory_and_no_file(whole: Bed) -> None:
    memory, sample = [], 0
    for _ in range(FLIPS):
        while whole.engine.active < 3:
            sample += 1
            whole.submit([whole.model.request(sample, length=140, new=20)])
        whole.engine.step()
        whole.serve_files([whole.updates.step()])
        assert whole.in_memory() == 0
        memory.append(resident_bytes())
    whole.finish()
    assert memory[-1] - memory[FLIPS // 2] < GROWTH, [round(each / 1e6) for each in memory]
    assert_serves(whole, oracle(whole))

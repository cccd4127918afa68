"""The record of an attempt over many calls: nothing twice, each token after what it was sampled after."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.routes import ROUTES, UNKNOWN
from async_rl.top_tokens import TOP_IDS, TopTokens
from async_rl.trajectory import MaskReason, Segment, Trajectory, check_trajectory, pack_segments
from async_rl.version import VersionRun, tokens_of
from inference.engine import Completion
from inference.transcript import Place, Transcript, TranscriptError

S, P, E, T = MaskReason.SAMPLED, MaskReason.PROMPT, MaskReason.ENVIRONMENT, MaskReason.TEMPLATE


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def said(*tokens: int, version: int = 3, **changes: Any) -> Completion:
    logprobs = -np.array(tokens, np.float32) / 100
    values: dict[str, Any] = {"finish": "stop", "queued_s": 0.5, "sampling_s": 1.0} | changes
    runs = (VersionRun(version, f"{version}" * 64, len(tokens)),)
    return Completion((1, -1), ids(*tokens), logprobs, runs, **values)


def test_a_call_that_goes_on_stays_in_its_segment_and_only_what_is_between_is_new() -> None:
    transcript = Transcript()
    assert transcript.sampled(ids(1, 2), said(3, 4)) == Place(0, 3)
    assert transcript.grows_by(ids(1, 2, 3, 4, 5)) == 1
    reasons = np.array([P, P, S + T, T, E, T], np.uint8)
    assert transcript.sampled(ids(1, 2, 3, 4, 5, 6), said(7, version=4, finish="length"), reasons) == Place(0, 6)
    (segment,) = transcript.segments()
    assert segment.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert segment.mask.tolist() == [P, P, S, S, E, T, S]
    assert segment.logprobs[segment.mask == S] == pytest.approx([-0.03, -0.04, -0.07])
    assert not segment.logprobs[segment.mask != S].any()
    assert [(run.version, run.count) for run in segment.versions] == [(3, 2), (4, 1)]
    assert segment.finish == "length"
    assert (transcript.queued_s, transcript.sampling_s, transcript.calls) == (1.0, 2.0, 2)


def test_runs_of_one_policy_are_one_run() -> None:
    transcript = Transcript()
    transcript.sampled(ids(1), said(2, 3))
    transcript.sampled(ids(1, 2, 3, 9), said(4))
    assert [(run.version, run.count) for run in transcript.segments()[0].versions] == [(3, 3)]


def test_a_rewritten_history_begins_another_segment_and_the_first_one_stays() -> None:
    transcript = Transcript()
    transcript.sampled(ids(1, 2), said(3, 4))
    assert transcript.sampled(ids(1, 2, 4, 5), said(6)) == Place(1, 4)
    first, second = transcript.segments(cut=True)
    assert (first.tokens.tolist(), first.finish) == ([1, 2, 3, 4], "stop")
    assert (second.tokens.tolist(), second.mask.tolist()) == ([1, 2, 4, 5, 6], [P, P, P, P, S])
    assert second.finish == "length"
    assert transcript.n_tokens == 9
    assert transcript.n_sampled == 3


def test_two_calls_after_the_same_tokens_train_each_token_once() -> None:
    transcript = Transcript()
    transcript.sampled(ids(1), said(2))
    transcript.sampled(ids(1, 2, 3), said(4))
    assert transcript.sampled(ids(1, 2, 3), said(5)) == Place(1, 3), "its prompt does not hold what the other sampled"
    assert [segment.mask.tolist() for segment in transcript.segments()] == [[P, S, E, S], [P, P, P, S]]


def test_the_longest_of_several_segments_goes_on() -> None:
    transcript = Transcript()
    transcript.sampled(ids(1), said(2))
    transcript.sampled(ids(1, 9), said(3))
    transcript.sampled(ids(1, 9, 3, 4), said(5))
    transcript.sampled(ids(1, 2, 7), said(8))
    assert [segment.tokens.tolist() for segment in transcript.segments()] == [[1, 2, 7, 8], [1, 9, 3, 4, 5]]


def test_likeliest_tokens_and_routes_stand_where_they_were_sampled() -> None:
    def with_extras(prompt: int, *tokens: int, mark: int) -> Completion:
        n = len(tokens)
        top = TopTokens(np.full((n, 2), mark, np.int32), np.zeros((n, 2), np.float32))
        return said(*tokens, top=top, routes=np.full((prompt + n - 1, 1, 1), mark))

    transcript = Transcript()
    transcript.sampled(ids(1, 2), with_extras(2, 3, 4, mark=5))
    transcript.sampled(ids(1, 2, 3, 4, 6), with_extras(5, 7, mark=8))
    (segment,) = transcript.segments()
    assert segment.extras[TOP_IDS][:, 0].tolist() == [0, 0, 5, 5, 0, 8]
    # 3 positions were computed at first; the fourth, the last one sampled, and the two after it by the second call.
    assert segment.extras[ROUTES][:, 0, 0].tolist() == [5, 5, 5, 8, 8, UNKNOWN]
    assert not transcript.segments(trains=False)[0].extras


def test_rewards_of_turns_are_kept_at_the_turns_last_token() -> None:
    transcript = Transcript()
    place = transcript.sampled(ids(1, 2), said(3, 4))
    transcript.rewarded(place, 0.5)
    assert [(each.segment, each.position, each.value) for each in transcript.position_rewards] == [(0, 3, 0.5)]


def test_a_call_that_contradicts_itself_is_refused() -> None:
    transcript = Transcript()
    for prompt, completion, reasons in (
        (ids(), said(1), None),
        (ids(1), said(), None),
        (ids(1, 2), said(3), np.array([P], np.uint8)),
        (ids(1, 2), said(3), np.array([P, S], np.uint8)),
    ):
        with pytest.raises(TranscriptError):
            transcript.sampled(prompt, completion, reasons)
    assert transcript.n_segments == 0


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_whatever_the_calls_every_sampled_token_is_recorded_once_after_what_it_was_sampled_after(
    data: st.DataObject,
) -> None:
    """Calls go on from any earlier one, or from none, with few different tokens, so that prefixes meet by chance."""
    some = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    transcript, calls = Transcript(), []
    histories: list[list[int]] = [[]]
    for number in range(data.draw(st.integers(1, 8))):
        prompt = [*data.draw(st.sampled_from(histories)), *data.draw(some)]
        completion = said(*data.draw(some), version=number)
        place = transcript.sampled(ids(*prompt), completion)
        calls.append((prompt, completion.tokens.tolist(), place, number))
        histories.append([*prompt, *completion.tokens.tolist()])
    segments = transcript.segments()
    for prompt, sampled, (segment, position), number in calls:
        tokens, mask = segments[segment].tokens.tolist(), segments[segment].mask.tolist()
        assert tokens[: position + 1] == [*prompt, *sampled]
        assert mask[position + 1 - len(sampled) : position + 1] == [S] * len(sampled)
        assert sampled_under(segments[segment])[position + 1 - len(sampled) : position + 1] == [number] * len(sampled)
    assert transcript.n_sampled == sum(len(sampled) for _, sampled, _, _ in calls)
    headers, arrays = pack_segments(segments)
    check_trajectory(Trajectory(1, 0, "ok", 0.0, headers, arrays), vocabulary_size=3)


def sampled_under(segment: Segment) -> list[int | None]:
    """The version of each token, None where the model did not write it."""
    versions = iter([run.version for run in segment.versions for _ in range(run.count)])
    assert tokens_of(segment.versions) == int((segment.mask == S).sum())
    return [next(versions) if reason == S else None for reason in segment.mask.tolist()]

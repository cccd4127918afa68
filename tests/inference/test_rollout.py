"""The rollout worker's books: requests out, trajectories back, and every training sample counted once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Instance, Split, TaskError
from async_rl.top_tokens import TopTokens, top_of
from async_rl.trajectory import (
    MaskReason,
    Packed,
    Timings,
    Trajectory,
    check_trajectory,
    decode_trajectory,
    segment_arrays,
)
from async_rl.version import PolicyId, VersionRun
from async_rl.wire.messages import Lease, SamplingParams
from inference.engine import Completion
from inference.rollout import RolloutBook, ToScore
from trainer.tiny_model import char_tokenizer

DIGITS = 5
TASK = load_task({"kind": "digit_sort", "digits": DIGITS})
TOKENIZER = char_tokenizer()
SAMPLING = SamplingParams(0.7, 12)
V3, V4 = PolicyId("main", 3, "3" * 64), PolicyId("main", 4, "4" * 64)


def book(task: Any = TASK) -> RolloutBook:
    return RolloutBook(task, TOKENIZER, "node-1", "torch")


def lease(number: int = 7, samples: tuple[int, ...] = (0, 1, 2), **changes: Any) -> Lease:
    values: dict[str, Any] = {
        "lease": number, "ticket": 40, "try_": 0, "instance": 11, "split": "train", "samples": samples,
        "seeds": tuple(1000 * number + sample for sample in samples), "min_version": 3, "sampling": SAMPLING,
    }  # fmt: skip
    return Lease(**(values | changes))


def evaluation(number: int) -> Lease:
    return lease(number, samples=(0,), ticket=-1, split="eval", policy=V3)


def completion(key: tuple[int, int], text: str = "12345", **changes: Any) -> Completion:
    tokens = np.array([*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id], np.int32)
    values: dict[str, Any] = {
        "tokens": tokens,
        "logprobs": -np.arange(1, len(tokens) + 1, dtype=np.float32),
        "versions": (VersionRun(3, V3.digest, 2), VersionRun(4, V4.digest, len(tokens) - 2)),
        "finish": "stop",
        "queued_s": 0.25,
        "sampling_s": 0.5,
    }
    return Completion(key, **(values | changes))


def aborted(key: tuple[int, int]) -> Completion:
    nothing = np.empty(0, np.int32)
    return completion(key, tokens=nothing, logprobs=nothing.astype(np.float32), versions=(), finish="abort")


def score(books: RolloutBook, key: tuple[int, int], reward: float = 1.0, error: str = "") -> Trajectory | None:
    return sent(books.scored(key, reward, {"positions": 0.5}, 0.125, error))


def sent(packed: Packed | ToScore | None) -> Trajectory | None:
    """What the buffer will read."""
    return decode_trajectory(packed.joined()) if isinstance(packed, Packed) else None


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_lease_becomes_one_request_per_sample_with_its_own_seed_and_the_same_prompt() -> None:
    given_lease = lease(7, samples=(4, 0, 2))
    requests = book().open(given_lease)
    assert [request.key for request in requests] == [(7, 4), (7, 0), (7, 2)]
    assert [request.seed for request in requests] == [7004, 7000, 7002]
    question = TASK.instance("train", 11).prompt
    for request in requests:
        assert TOKENIZER.decode(request.prompt) == question
        assert request.prompt.dtype == np.int32
        assert (request.sampling, request.policy) == (SAMPLING, None)


def test_an_evaluation_asks_its_own_split_under_its_own_policy() -> None:
    (request,) = book().open(evaluation(8))
    assert request.policy == V3
    assert TOKENIZER.decode(request.prompt) == TASK.instance("eval", 11).prompt != TASK.instance("train", 11).prompt


class Few(DigitSort):
    """A task with an end."""

    def size(self, split: Split) -> int | None:
        return 4 if split == "train" else 3


def test_a_finite_split_is_gone_through_again_and_scored_as_the_instance_that_was_asked() -> None:
    books = book(Few(DigitSortConfig(digits=DIGITS)))
    (request,) = books.open(lease(1, samples=(0,), instance=11))
    assert TOKENIZER.decode(request.prompt) == TASK.instance("train", 3).prompt
    assert books.sampled(completion((1, 0))) == ToScore(
        (1, 0), "train", 11, "12345"
    )  # scoring goes through it again too


# --- completions and scores ------------------------------------------------------------------------------------------


def test_a_completion_goes_to_scoring_as_text_without_its_stop_token() -> None:
    books = book()
    books.open(lease())
    assert books.sampled(completion((7, 1), "01299")) == ToScore((7, 1), "train", 11, "01299")


def test_a_scored_completion_is_a_trajectory_whose_arrays_line_up() -> None:
    books = book()
    prompt = books.open(lease())[0].prompt
    sampled = completion((7, 1))
    books.sampled(sampled)
    trajectory = score(books, (7, 1), reward=0.75)
    assert trajectory is not None
    check_trajectory(trajectory)
    (arrays,) = segment_arrays(trajectory)
    n = len(prompt)
    assert n == DIGITS + 1
    assert arrays.tokens.tolist() == [*prompt, *sampled.tokens]
    assert arrays.mask.tolist() == [MaskReason.PROMPT] * n + [MaskReason.SAMPLED] * 6
    assert arrays.logprobs.tolist() == [0.0] * n + [-1, -2, -3, -4, -5, -6]
    assert trajectory.versions == sampled.versions
    (header,) = trajectory.segments
    assert header.finish == "stop"
    assert (trajectory.attempt, trajectory.status, trajectory.reward) == ("7/1", "ok", 0.75)
    assert (trajectory.node, trajectory.engine, trajectory.components) == ("node-1", "torch", {"positions": 0.5})
    assert trajectory.timings == Timings(queued_s=0.25, sampling_s=0.5, scoring_s=0.125)


def test_arrays_are_copied_when_they_leave_and_not_before() -> None:
    books = book()
    books.open(lease())
    sampled = completion((7, 0))
    books.sampled(sampled)
    packed = books.scored((7, 0), 1.0, {}, 0.0, "")
    assert packed is not None
    assert packed.lease == 7
    lengths = [each.nbytes for each in packed.parts if isinstance(each, np.ndarray)]
    n = DIGITS + 1 + len(sampled.tokens)
    assert lengths == [4 * n, 4 * n, n]  # token ids, log-probabilities and mask as they were made


def test_a_completion_of_one_token_is_a_whole_trajectory() -> None:
    books = book()
    books.open(lease())
    books.sampled(completion((7, 0), "", versions=(VersionRun(4, V4.digest, 1),), finish="length"))
    trajectory = score(books, (7, 0), reward=0.0)
    assert trajectory is not None
    check_trajectory(trajectory)
    assert trajectory.n_tokens == DIGITS + 2


def failures(books: RolloutBook) -> list[tuple[Any, str, str]]:
    """(trajectory, status, note) of every way to fail."""
    books.open(lease())
    books.open(evaluation(8))
    books.sampled(completion((7, 0)))
    return [
        (score(books, (7, 0), error="the verifier raised"), "env_failed", "the verifier raised"),
        (sent(books.sampled(aborted((7, 1)))), "aborted", "the engine aborted it"),
        (sent(books.unstarted((8, 0), "the store has it no longer")), "aborted", "the store has it no longer"),
        *((sent(one), "env_failed", "too long") for one in books.refused(lease(9, samples=(5,)), "too long")),
    ]


def test_a_failure_says_which_and_why_and_carries_nothing_that_could_train() -> None:
    for trajectory, status, note in failures(book()):
        assert (trajectory.status, trajectory.note) == (status, note)
        assert (trajectory.reward, trajectory.segments, trajectory.arrays.nbytes) == (0.0, (), 0)
        assert trajectory.node == "node-1"
        check_trajectory(trajectory)


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_names_what_is_still_under_way_and_late_news_of_it_gives_nothing() -> None:
    books = book()
    books.open(lease())
    for sample in (0, 1):
        books.sampled(completion((7, sample)))
    assert score(books, (7, 0)) is not None
    assert list(books.cancel(7)) == [(7, 1), (7, 2)]
    assert books.leases() == []
    assert score(books, (7, 1)) is None
    assert books.sampled(completion((7, 2))) is None
    assert books.sampled(aborted((7, 2))) is None
    assert score(books, (7, 2)) is None
    assert books.unstarted((7, 2), "gone") is None
    assert list(books.cancel(7)) == []
    assert books.closed_training_samples == 3


def test_a_score_that_comes_twice_or_unasked_gives_nothing() -> None:
    books = book()
    books.open(lease())
    assert score(books, (7, 0)) is None
    books.sampled(completion((7, 0)))
    assert score(books, (7, 0)) is not None
    assert score(books, (7, 0)) is None
    assert books.closed_training_samples == 1


class Chat(DigitSort):
    """Asks in messages, for which the tokenizer here has no template."""

    def instance(self, split: Split, instance: int) -> Instance:
        question = super().instance(split, instance)
        return Instance(None, ({"role": "user", "content": str(question.prompt)},), question.answer)


def test_a_lease_that_cannot_even_be_opened_is_refused_sample_by_sample_and_counted() -> None:
    """Otherwise the node would ask for that much less work for ever."""
    books = book(Chat(DigitSortConfig(digits=DIGITS)))
    for number, split, counted in [(1, "train", 3), (2, "eval", 3), (3, "train", 6)]:
        broken = lease(number, split=split)
        with pytest.raises(TaskError):
            books.open(broken)
        refused = books.refused(broken, "no template")
        said = [decode_trajectory(one.joined()) for one in refused]
        assert [(one.attempt, one.status) for one in said] == [(f"{number}/{n}", "env_failed") for n in range(3)]
        assert books.closed_training_samples == counted
    assert books.leases() == []


def test_a_lease_that_was_opened_and_is_refused_then_is_counted_once() -> None:
    books = book()
    opened = lease()
    books.open(opened)
    assert len(books.refused(opened, "the prompt is too long")) == 3
    assert (books.closed_training_samples, books.leases()) == (3, [])


# --- counting --------------------------------------------------------------------------------------------------------

OUTCOMES = ["ok", "score failed", "aborted", "unstarted"]


@st.composite
def histories(draw: Any) -> tuple[list[Lease], list[tuple[str, Any]]]:
    """Leases, and everything that becomes of their samples in any order: each sample is sampled, aborted or cannot
    start, and may be scored; a lease may be cancelled at any time, and what was under way is heard of all the same."""
    leases = []
    for number in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            leases.append(lease(number, samples=tuple(range(draw(st.integers(1, 4))))))
        else:
            leases.append(evaluation(number))
    keys = [(one.lease, sample) for one in leases for sample in one.samples]
    outcome = {key: draw(st.sampled_from(OUTCOMES)) for key in keys}
    # Each key stands in the order twice: its first place is the engine's word, its second the scorer's.
    order = draw(st.permutations([*keys, *keys]))
    cancelled = draw(st.sets(st.sampled_from([one.lease for one in leases])))
    events: list[tuple[str, Any]] = []
    seen: Counter[tuple[int, int]] = Counter()
    for key in order:
        seen[key] += 1
        if seen[key] == 1:
            events.append((outcome[key] if outcome[key] in ("aborted", "unstarted") else "sampled", key))
        elif outcome[key] in ("ok", "score failed"):
            events.append((outcome[key], key))
    for number in cancelled:
        events.insert(draw(st.integers(0, len(events))), ("cancel", number))
    return leases, events


@given(histories())
def test_every_training_sample_is_counted_once_whatever_became_of_it_and_no_other(
    history: tuple[list[Lease], list[tuple[str, Any]]],
) -> None:
    leases, events = history
    books = book()
    for one in leases:
        books.open(one)
    keys = {(one.lease, sample): one.split for one in leases for sample in one.samples}
    delivered: set[tuple[int, int]] = set()
    cancelled: set[tuple[int, int]] = set()
    for event, subject in events:
        result: Any = None
        if event == "cancel":
            named = set(books.cancel(subject))
            assert named == {key for key in keys if key[0] == subject} - delivered
            cancelled |= named
        elif event == "sampled":
            asked = books.sampled(completion(subject))
            assert isinstance(asked, ToScore) == (subject not in cancelled)
        elif event == "aborted":
            result = sent(books.sampled(aborted(subject)))
        elif event == "unstarted":
            result = sent(books.unstarted(subject, "it cannot be had"))
        else:
            result = score(books, subject, error="raised" if event == "score failed" else "")
        if result is not None:
            key = (result.lease, result.sample)
            assert key == subject
            assert key not in delivered | cancelled
            delivered.add(key)
            check_trajectory(result)
        closed = delivered | cancelled
        assert books.closed_training_samples == sum(keys[key] == "train" for key in closed)
        assert set(books.leases()) == {key[0] for key in keys.keys() - closed}
    assert delivered | cancelled == keys.keys()


# --- the sampler's likeliest tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "eval"])
def test_likeliest_tokens_travel_with_what_trains_and_with_nothing_else(split: str) -> None:
    books = book()
    opened = lease(7, samples=(0,)) if split == "train" else evaluation(7)
    (request,) = books.open(opened)
    m, n_prompt = len(completion((7, 0)).tokens), len(request.prompt)
    top = TopTokens(np.arange(2 * m, dtype=np.int32).reshape(m, 2), -np.ones((m, 2), np.float32))
    books.sampled(completion((7, 0), top=top))
    made = score(books, (7, 0))
    assert made is not None
    check_trajectory(made)
    (arrays,) = segment_arrays(made)
    assert set(arrays.extras) == ({"top_ids", "top_logprobs"} if split == "train" else set())
    if split == "train":
        found = top_of(arrays)
        assert not found.ids[:n_prompt].any()
        assert not found.logprobs[:n_prompt].any()
        assert np.array_equal(found.ids[n_prompt:], top.ids)
        assert np.array_equal(found.logprobs[n_prompt:], top.logprobs)


def test_a_set_of_evaluation_with_a_task_of_its_own_asks_that_and_all_others_ask_the_runs() -> None:
    own = load_task({"kind": "digit_sort", "digits": 3})
    made = RolloutBook(TASK, TOKENIZER, "node-1", "torch", eval_tasks={"short": own})
    prompts = {}
    for number, name in enumerate(("short", "other", "")):
        (request,) = made.open(lease(number, samples=(0,), ticket=-1, split="eval", policy=V3, eval_set=name))
        prompts[name] = len(request.prompt)
        asked = made.sampled(completion((number, 0)))
        assert isinstance(asked, ToScore)
        assert asked.eval_set == name
    assert prompts["other"] == prompts[""] == prompts["short"] + DIGITS - 3


def test_what_is_being_scored_does_not_keep_the_engine_from_its_next_samples() -> None:
    books = book()
    books.open(lease(7))
    books.open(evaluation(8))
    assert books.sampled_training_samples == 0
    for key in ((7, 0), (7, 1), (8, 0)):
        assert isinstance(books.sampled(completion(key)), ToScore)
    assert (books.closed_training_samples, books.sampled_training_samples) == (0, 2)
    books.scored((7, 0), 1.0, {}, 0.1, "")
    assert (books.closed_training_samples, books.sampled_training_samples) == (1, 2)
    list(books.cancel(7))
    assert books.closed_training_samples == books.sampled_training_samples == 3

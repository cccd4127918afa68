"""A node that leaves: what it says to the buffer, on a real engine and real books, and what another makes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from simulated_server import SimulatedServer

from async_rl.tasks.digit_sort import DigitSort, DigitSortConfig
from async_rl.trajectory import Trajectory, TrajectoryError, check_trajectory, decode_trajectory
from async_rl.version import PolicyId
from async_rl.wire.messages import GiveBack, HandOver, Lease, LeaseSamples, Message, NodeDraining, SamplingParams
from inference.departure import Departure
from inference.engine import Completion, Request
from inference.rollout import Attempt, RolloutBook, ToScore
from inference.served_calls import SIGNALS_S
from inference.served_engine import ServedEngine
from inference.server import EngineDied
from inference.serving import Serving

TASK = DigitSort(DigitSortConfig(digits=5))
NEW = 20


class Tokens:
    """For the tests' model, which has 29 tokens."""

    eos_token_id = -1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) % 29 for character in text]

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(chr(97 + number) for number in ids)


def lease(number: int, *samples: int, policy: PolicyId | None = None) -> Lease:
    seeds = tuple(1000 * number + sample for sample in samples)
    split = "train" if policy is None else "eval"
    ticket = number if policy is None else -1
    return Lease(number, ticket, 0, number, split, samples, seeds, 0, SamplingParams(1.0, NEW), policy)


class Place:
    """A node without its sockets: books, engine, serving and departure, and what was said to the buffer."""

    def __init__(
        self, tiny: Any, handover: Any = "continue", slots: int = 3, in_flight: Any = "finish", engine: Any = None
    ) -> None:
        self.engine = engine or tiny.engine(slots=slots)
        self.asked: list[PolicyId] = []
        self.unstarted: list[Any] = []
        self.serving = Serving(
            self.engine, in_flight, 10.0, self.asked.append, lambda *_: None,
            lambda *args: self.unstarted.append(args), lambda installed: None,
        )  # fmt: skip
        self.book = RolloutBook(TASK, Tokens(), "node", "torch")
        self.said: list[Message] = []
        self.departure = Departure(self.book, self.serving, handover, lambda message, blobs: self.said.append(message))
        self.done: dict[tuple[int, int], Completion] = {}
        self.to_score: list[ToScore] = []

    def start(self, given: Lease) -> None:
        for request in self.book.open(given):
            self.serving.submit(request)

    def take_over(self, given: Lease, prefixes: list[Trajectory]) -> None:
        for work in self.book.take_over(given, prefixes):
            if isinstance(work, Request):
                self.serving.submit(work)
            else:
                self.to_score.append(work)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.note(self.engine.step())

    def note(self, completions: list[Completion]) -> None:
        for completion in completions:
            self.done[completion.key] = completion
            self.to_score.append(self.book.sampled(completion))

    def leave(self) -> int:
        """As the node does."""
        self.note(self.engine.finished())
        return self.departure.leave()

    def handed_over(self) -> list[Trajectory]:
        (message,) = [each for each in self.said if isinstance(each, HandOver)]
        return [decode_trajectory(raw) for raw in message.prefixes]


def given_back(place: Place) -> list[LeaseSamples]:
    return [item for message in place.said if isinstance(message, GiveBack) for item in message.leases]


def test_it_says_so_and_gives_back_at_once_what_has_not_begun(qwen):
    place = Place(qwen)
    place.start(lease(1, 0, 1, 2))
    place.steps(3)
    place.start(lease(2, 0, 1))
    place.start(lease(3, 0, policy=qwen.policy(2)[0]))  # waits for a policy that is not here
    place.departure.begin(100.0, 5.0, "test")
    assert place.said == [
        NodeDraining(5.0), GiveBack((LeaseSamples(2, (0, 1)), LeaseSamples(3, (0,))))
    ]  # fmt: skip
    assert place.book.leases() == [1]
    assert place.engine.active == 3
    place.departure.refuse(lease(4, 0, 1))
    assert given_back(place)[-1] == LeaseSamples(4, (0, 1))


def test_attempts_of_several_calls_go_on_until_the_grace_is_over_and_are_given_back_then(qwen):
    place = Place(qwen, slots=1)
    place.book = RolloutBook(TASK, Tokens(), "node", "torch", plays=("",))
    place.departure = Departure(
        place.book, place.serving, "continue", lambda message, blobs: place.said.append(message)
    )
    assert [type(each) for each in place.book.open(lease(1, 0, 1))] == [Attempt, Attempt]
    for call in (-1, -2):  # one runs, one waits for the slot
        place.serving.submit(Request((1, call), qwen.prompt(1, 4), SamplingParams(1.0, NEW), 7))
    place.engine.step()
    place.departure.begin(100.0, 5.0, "test")
    assert place.said == [NodeDraining(5.0)], "a call that waits is no sample"
    assert [request.key for request in place.serving.waiting()] == [(1, -2)]
    place.departure.leave()
    assert given_back(place) == [LeaseSamples(1, (0, 1))]
    assert not place.book.leases()


def test_it_samples_until_a_second_before_the_end_or_until_nothing_is_left(qwen):
    place = Place(qwen)
    place.start(lease(1, 0))
    place.steps(1)
    assert not place.departure.is_due(1e9)
    place.departure.begin(100.0, 5.0, "test")
    assert not place.departure.is_due(103.9)
    assert place.departure.is_due(104.0)
    place.departure.begin(100.0, 60.0, "told again, with more time")
    assert place.departure.is_due(104.0)
    place.departure.begin(101.0, 2.0, "told again, with less")
    assert place.departure.is_due(102.0)
    place.steps(NEW + 1)
    assert place.book.scored((1, 0), 1.0, {}, 0.0, "") is not None
    assert place.departure.is_due(101.0)
    assert [type(message) for message in place.said] == [NodeDraining]


def test_what_it_hands_over_is_gone_on_with_to_the_same_end(qwen):
    whole, first, second = (Place(qwen) for _ in range(3))
    given_lease = lease(1, 0, 1, 2)
    whole.start(given_lease)
    whole.steps(NEW + 2)
    first.start(given_lease)
    first.steps(4)
    first.departure.begin(100.0, 1.0, "test")
    assert first.departure.leave() == 15  # five tokens each: one with the prefill, four by steps
    assert (first.book.leases(), first.engine.active) == ([], 0)
    prefixes = first.handed_over()
    for prefix in prefixes:
        check_trajectory(prefix)
        assert (prefix.status, prefix.segments[0].finish) == ("aborted", "abort")
    second.take_over(given_lease, prefixes)
    second.steps(NEW + 2)
    for sample in range(3):
        one, other = second.done[(1, sample)], whole.done[(1, sample)]
        assert (one.tokens.tolist(), one.versions, one.finish) == (other.tokens.tolist(), other.versions, other.finish)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.resumed == 5
    packed = second.book.scored((1, 0), 0.5, {}, 0.0, "")
    assert packed is not None
    scored = decode_trajectory(packed.joined())
    check_trajectory(scored)
    assert scored.n_tokens == 6 + len(whole.done[(1, 0)].tokens)
    assert scored.timings.sampling_s > prefixes[0].timings.sampling_s > 0


def test_what_only_lacks_its_score_is_scored_elsewhere(qwen):
    first, second = Place(qwen), Place(qwen)
    first.start(lease(1, 0))
    first.steps(NEW + 1)
    first.departure.begin(100.0, 1.0, "test")
    assert first.departure.leave() == 0  # it was counted when it came
    second.take_over(lease(1, 0), first.handed_over())
    assert second.engine.active == 0
    assert second.to_score == first.to_score
    assert second.book.scored((1, 0), 1.0, {}, 0.0, "") is not None


@pytest.fixture
def served(qwen: Any) -> Iterator[tuple[ServedEngine, SimulatedServer]]:
    server = SimulatedServer()
    engine = ServedEngine(server, qwen.path, slots=3, max_context=48, max_resident=3, stop_tokens=())
    try:
        engine.install(*qwen.policy(0))
        engine.flip(qwen.policy(0)[0], "finish")
        yield engine, server
    finally:
        engine.close()


@pytest.mark.parametrize("died", [False, True])
def test_an_answer_that_nobody_has_looked_at_yet_is_handed_over_and_not_sampled_again(qwen, served, died):
    """A server that has a loop of its own is ahead of the node; it may have died since, too."""
    engine, server = served
    first, second = Place(qwen, engine=engine), Place(qwen)
    given_lease = lease(1, 0, 1)
    first.start(given_lease)
    server.allowed = 0
    first.steps(1)
    server.allowed = math.inf
    deadline = time.monotonic() + 60
    while server.done < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if died:
        server.raises = {"check": EngineDied("it is gone")}
        time.sleep(2.5 * SIGNALS_S)
    first.departure.begin(100.0, 1.0, "test")
    assert first.leave() == 0  # they were counted when they came
    assert given_back(first) == []
    second.take_over(given_lease, first.handed_over())
    assert second.engine.active == 0
    # The server's two calls are tasks of its own: which one the node hears of first is chance.
    assert sorted(second.to_score, key=attrgetter("key")) == sorted(first.to_score, key=attrgetter("key"))
    scored = [second.book.scored((1, sample), 1.0, {}, 0.0, "") for sample in (0, 1)]
    assert [packed and decode_trajectory(packed.joined()).n_tokens for packed in scored] == [6 + NEW] * 2


def test_handed_over_twice_it_is_still_the_same_and_each_counts_its_own_tokens(qwen):
    first, second, third, whole = (Place(qwen) for _ in range(4))
    given_lease = lease(1, 0, 1)
    whole.start(given_lease)
    whole.steps(NEW + 2)
    first.start(given_lease)
    first.steps(2)
    second_work = []
    for place, then in ((first, second), (second, third)):
        place.departure.begin(100.0, 1.0, "test")
        second_work.append(place.departure.leave())
        then.take_over(given_lease, place.handed_over())
        then.steps(3)
    assert second_work == [2 * 3, 2 * 4]
    third.steps(NEW)
    assert [third.done[(1, sample)].tokens.tolist() for sample in (0, 1)] == [
        whole.done[(1, sample)].tokens.tolist() for sample in (0, 1)
    ]


def test_it_passes_on_what_it_was_handed_and_did_not_begin_with(qwen):
    first, second = Place(qwen), Place(qwen, slots=1)
    first.start(lease(1, 0, 1))
    first.steps(3)
    first.departure.begin(100.0, 1.0, "test")
    first.departure.leave()
    second.start(lease(9, 0))
    second.steps(1)
    second.take_over(lease(1, 0, 1), first.handed_over())
    second.departure.begin(100.0, 1.0, "test")
    assert given_back(second) == []
    second.departure.leave()
    assert [(prefix.lease, prefix.sample) for prefix in second.handed_over()] == [(9, 0), (1, 0), (1, 1)]


def test_with_discard_and_of_evaluation_nothing_is_handed_over(qwen):
    discarding = Place(qwen, handover="discard")
    discarding.start(lease(1, 0, 1))
    discarding.steps(3)
    evaluating = Place(qwen)
    evaluating.start(lease(2, 0, policy=qwen.policy(0)[0]))
    evaluating.steps(3)
    for place, expected in ((discarding, LeaseSamples(1, (0, 1))), (evaluating, LeaseSamples(2, (0,)))):
        place.departure.begin(100.0, 1.0, "test")
        place.departure.leave()
        assert given_back(place) == [expected]
        assert not any(isinstance(message, HandOver) for message in place.said)
        assert place.engine.active == 0


# --- under which policy it goes on -----------------------------------------------------------------------------------


def begun_under_0(qwen: Any) -> list[Trajectory]:
    first = Place(qwen)
    first.start(lease(1, 0))
    first.steps(3)
    first.departure.begin(100.0, 1.0, "test")
    first.departure.leave()
    return first.handed_over()


def serving_only(qwen: Any, version: int, **options: Any) -> Place:
    place = Place(qwen, **options)
    place.engine.install(*qwen.policy(version))
    place.engine.flip(qwen.policy(version)[0], "finish")
    place.engine.evict(qwen.policy(0)[0])
    return place


def versions_of(place: Place) -> list[tuple[int, int]]:
    place.steps(NEW + 2)
    return [(run.version, run.count) for run in place.done[(1, 0)].versions]


def test_its_policy_is_pulled_where_there_is_room_for_it(qwen):
    place = serving_only(qwen, 1)
    place.take_over(lease(1, 0), begun_under_0(qwen))
    assert place.asked == [qwen.policy(0)[0]]
    assert place.engine.active == 0
    place.engine.install(*qwen.policy(0))
    place.serving._start_waiting(qwen.policy(0)[0])  # as when it was fetched
    assert versions_of(place) == [(0, NEW)]


def test_where_it_cannot_be_had_the_serving_one_goes_on(qwen):
    place = serving_only(qwen, 1)
    place.take_over(lease(1, 0), begun_under_0(qwen))
    place.serving.fetch_failed(qwen.policy(0)[0], "the store has it no longer")
    assert versions_of(place) == [(0, 4), (1, NEW - 4)]
    assert place.unstarted == []


def test_where_there_is_no_room_it_is_not_waited_for(qwen):
    place = serving_only(qwen, 1)
    for version in (2, 3):
        place.engine.install(*qwen.policy(version))
        place.engine.submit(qwen.request(version, new=30, policy=qwen.policy(version)[0]))
    place.take_over(lease(1, 0), begun_under_0(qwen))
    assert place.asked == []
    assert versions_of(place) == [(0, 4), (1, NEW - 4)]


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_where_requests_move_with_the_serving_policy_so_does_this_one(qwen, in_flight):
    place = Place(qwen, in_flight=in_flight)
    place.engine.install(*qwen.policy(1))
    place.engine.flip(qwen.policy(1)[0], in_flight)
    place.take_over(lease(1, 0), begun_under_0(qwen))
    assert place.asked == []
    assert versions_of(place) == [(0, 4), (1, NEW - 4)]


def test_prefixes_of_another_lease_or_sample_are_refused(qwen):
    prefixes = begun_under_0(qwen)
    for wrong in (lease(2, 0), lease(1, 1), lease(1, 0, 1)):
        with pytest.raises(TrajectoryError):
            Place(qwen).book.take_over(wrong, prefixes)

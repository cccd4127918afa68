"""Whatever verifiers and workers do, every completion gets one verdict, and an innocent one never an error."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.scoring_queue import BATCH, READ_S, ScoringQueue
from inference.scoring_worker import Job, Reading, Verdict

TIMEOUT_S = 10.0


class Fault(NamedTuple):
    """How a completion's scoring fails, the first `times` times."""

    kind: Literal["raises", "crashes", "hangs"]
    times: int


faults = st.one_of(
    st.just(Fault("raises", 0)), st.builds(Fault, st.sampled_from(["raises", "crashes", "hangs"]), st.integers(0, 5))
)


class Played:
    """Workers that do what the completions' faults say, in an order of chance."""

    def __init__(self, plan: list[Fault], workers: int, tries: int, concurrency: int, seed: int) -> None:
        self.plan, self.workers, self.concurrency = plan, workers, concurrency
        self.queue = ScoringQueue(workers, tries)
        self.random = random.Random(seed)
        self.sent: dict[int, list[int]] = {}
        self.failed = [0] * len(plan)
        self.verdicts: dict[int, Verdict] = {}
        self.now, self.next = 0.0, 0
        for number in range(len(plan)):
            self.queue.submit(Job(number, "train", 0, "", ""))

    def run(self) -> dict[int, Verdict]:
        for _ in range(10_000):
            if len(self.verdicts) == len(self.plan):
                return self.verdicts
            for worker in self.sent:
                self.sent[worker] += [job.number for job in self.queue.take(worker, self.now)]
                assert len(self.sent[worker]) <= (BATCH if self.concurrency == 1 else self.concurrency)
            for _ in range(self.queue.to_start):
                self.queue.start(self.next)
                self.queue.started(self.next, self.concurrency, 0.0)
                if self.random.random() < 0.9:
                    self.sent[self.next] = []
                else:
                    self.take(self.queue.lost(self.next, "died idle"))
                self.next += 1
            assert len(self.sent) <= self.workers
            busy = [worker for worker, numbers in self.sent.items() if numbers]
            if busy:
                self.step(self.random.choice(busy))
        raise AssertionError(f"no end: {self.verdicts}")

    def step(self, worker: int) -> None:
        """It comes to an end with one of those that it is on."""
        self.now += self.random.randrange(64) / 64  # exact in binary, as are the sums
        numbers = self.sent[worker]
        number = self.random.choice(numbers[: self.concurrency])
        fault = self.plan[number]
        if self.failed[number] >= fault.times:
            numbers.remove(number)
            verdict = Verdict(number, 1.0, {}, self.random.choice([0.0, 1.0]), "")
            self.take([self.queue.answered(worker, verdict, self.now)])
            return
        self.failed[number] += 1
        if fault.kind == "raises":
            numbers.remove(number)
            self.take([self.queue.answered(worker, Verdict(number, 0.0, {}, 0.0, "raised"), self.now)])
            return
        others = len(numbers[: self.concurrency]) > 1
        del self.sent[worker]
        if fault.kind == "crashes":
            # Of several at once nobody is blamed: this one will be again, alone.
            self.failed[number] -= others
            self.take(self.queue.lost(worker, "crashed"))
        else:
            # Those that it is on besides have been given their time anew: only what is late is to blame.
            seat = self.queue._seats[worker]
            seat.begun = dict.fromkeys(seat.begun, self.now)
            seat.begun[number] = self.now - TIMEOUT_S
            assert self.queue.deadline(worker, TIMEOUT_S) == self.now
            self.take(self.queue.late(worker, TIMEOUT_S, self.now))

    def take(self, verdicts: list[Verdict | None]) -> None:
        for verdict in verdicts:
            if verdict is not None:
                assert verdict.number not in self.verdicts, "one verdict, and no more"
                self.verdicts[verdict.number] = verdict


@settings(deadline=None, max_examples=150)
@given(
    st.lists(faults, min_size=1, max_size=25),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_every_completion_gets_its_own_verdict_and_nobody_anothers_blame(
    plan: list[Fault], workers: int, tries: int, concurrency: int, seed: int
) -> None:
    verdicts = Played(plan, workers, tries, concurrency, seed).run()
    assert sorted(verdicts) == list(range(len(plan)))
    for number, fault in enumerate(plan):
        assert bool(verdicts[number].error) == (fault.times >= tries), (number, fault)
        if fault.times < tries:
            assert verdicts[number].reward == 1.0


def filled(workers: int, seconds: float, jobs: int = 100) -> ScoringQueue:
    """A worker that has answered some completions, each in so many seconds."""
    queue = ScoringQueue(workers, 1)
    for number in range(jobs):
        queue.submit(Job(number, "train", 0, "", ""))
    queue.start(0)
    queue.started(0, 1, 0.0)
    for _ in range(50):
        (first, *_) = queue.take(0, 0.0) or [None]
        if first is None:
            break
        for number in list(queue._seats[0].sent):
            queue.answered(0, Verdict(number, 1.0, {}, seconds, ""), 0.0)
    return queue


def test_fast_completions_share_a_message_and_slow_ones_are_left_for_other_workers() -> None:
    for seconds, at_once in ((1e-5, BATCH), (2e-3, 5), (0.1, 1), (1.0, 1)):
        queue = filled(4, seconds, 400)
        for number in range(1000, 1040):
            queue.submit(Job(number, "train", 0, "", ""))
        while queue._queue[0].job.number < 1000:
            queue._queue.popleft()
        assert abs(len(queue.take(0, 0.0)) - at_once) <= 1, seconds
        assert queue.to_start == 1


def test_workers_are_started_as_many_at_a_time_as_there_are_and_no_more_than_there_is_to_do() -> None:
    queue = ScoringQueue(32, 1)
    assert queue.to_start == 0
    for number in range(20):
        queue.submit(Job(number, "train", 0, "", ""))
    there, rounds = 0, []
    while queue.to_start:
        rounds.append(queue.to_start)
        for worker in range(there, there + rounds[-1]):
            queue.start(worker)
        assert queue.to_start == 0, "while some start, no others do"
        for worker in range(there, there + rounds[-1]):
            queue.started(worker, 1, 0.0)
            queue.take(worker, 0.0)
        there += rounds[-1]
    assert rounds == [1, 1, 2, 4, 8, 4]


def test_what_rewards_need_is_added_to_the_time_out() -> None:
    queue = ScoringQueue(1, 1)
    queue.submit(Job(7, "train", 0, "", ""))
    queue.start(0)
    queue.started(0, 1, 30.0)
    assert queue.deadline(0, TIMEOUT_S) is None
    queue.take(0, 100.0)
    assert queue.deadline(0, TIMEOUT_S) == 140.0
    (verdict,) = queue.late(0, TIMEOUT_S, 140.0)
    assert verdict == Verdict(7, 0.0, {}, 40.0, "scoring one completion took longer than 40 s: worker killed")


def test_while_a_worker_reads_its_data_there_is_another_limit_and_the_time_out_begins_when_it_has_found_it() -> None:
    queue = ScoringQueue(1, 1)
    queue.submit(Job(7, "train", 0, "", ""))
    queue.start(0)
    queue.started(0, 1, 0.0)
    queue.take(0, 100.0)
    queue.reads(0, Reading(7, False), 101.0)
    assert queue.deadline(0, TIMEOUT_S) == 101.0 + READ_S
    queue.reads(0, Reading(7, True), 500.0)
    assert queue.deadline(0, TIMEOUT_S) == 500.0 + TIMEOUT_S
    queue.reads(0, Reading(7, False), 501.0)
    (verdict,) = queue.late(0, TIMEOUT_S, 501.0 + READ_S)
    assert verdict.error == "reading its data took longer than 3600 s: worker killed"

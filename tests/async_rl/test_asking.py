"""Where a node asks: it is given what any shard has, never more than one buffer would give, and says little."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.asking import LOOKS, SILENT_S, TURN_FIRST_S, TURN_LATER_S, Ask, Asking

GROUP = 4


class Pool:
    """Shards that have so many groups, a node that asks them, and a clock. Each answers at once."""

    def __init__(self, groups: list[int], home: int = 0, silent: frozenset[int] = frozenset()) -> None:
        self.groups = groups
        self.asking = Asking(len(groups), GROUP, home)
        self.stands: dict[int, int] = {}
        self.granted = [0] * len(groups)
        self.messages = 0
        self.now = 0.0
        self.silent = silent

    def want(self, total: int) -> None:
        while asks := self.asking.wants(total, self.now):
            self.hear(asks)
            assert self.asking.outstanding + sum(self.granted) < total + GROUP  # of more than one buffer would give
            if len(self.groups) == 1:
                return

    def hear(self, asks: list[Ask]) -> None:
        for shard, total_samples, once in asks:
            self.messages += 1
            self.stands.pop(shard, None)
            if shard in self.silent:
                continue
            self.grant(shard, total_samples)
            if self.granted[shard] < total_samples:
                if once:
                    self.messages += 1
                    self.asking.refused(shard, self.granted[shard])
                else:
                    self.stands[shard] = total_samples

    def grant(self, shard: int, total_samples: int) -> None:
        while self.groups[shard] and self.granted[shard] < total_samples:
            self.groups[shard] -= 1
            self.granted[shard] += GROUP
            self.messages += 1
            self.asking.granted(shard, GROUP)

    def opens(self, shard: int, groups: int) -> None:
        self.groups[shard] += groups
        if shard in self.stands:
            self.grant(shard, self.stands[shard])
            if self.granted[shard] >= self.stands[shard]:
                del self.stands[shard]

    def wait(self, total: int, turns: int) -> None:
        for _ in range(turns):
            if self.asking.turn_at == math.inf:
                return
            self.now = self.asking.turn_at
            self.hear(self.asking.turn(self.now))
            self.want(total)


def turns_for_all(shards: int) -> int:
    return math.ceil(shards / LOOKS) + 1


@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=17), home=st.integers(0, 16), total=st.integers(1, 40)
)  # fmt: skip
def test_a_node_is_given_all_it_wants_if_the_shards_together_have_it(groups, home, total):
    pool = Pool(list(groups), home % len(groups))
    pool.want(total)
    pool.wait(total, turns_for_all(len(groups)) * 10)
    assert sum(pool.granted) == GROUP * min(math.ceil(total / GROUP), sum(groups))


@settings(max_examples=150)
@given(
    shards=st.integers(1, 17), home=st.integers(0, 16), total=st.integers(1, 40),
    openings=st.lists(st.tuples(st.integers(0, 16), st.integers(1, 2)), max_size=20),
)  # fmt: skip
def test_what_opens_at_any_shard_is_found_within_a_round_and_no_demand_is_with_two(shards, home, total, openings):
    pool = Pool([0] * shards, home % shards)
    for shard, groups in openings:
        pool.want(total)
        pool.opens(shard % shards, groups)
        pool.want(total)
        pool.wait(total, turns_for_all(shards) + groups)
        lacking = math.ceil(total / GROUP) * GROUP - sum(pool.granted)
        assert lacking <= 0 or not any(pool.groups)
        assert sum(asked - pool.granted[shard] for shard, asked in pool.stands.items()) < total + GROUP
        total += GROUP  # a group is done with


@settings(max_examples=30)
@given(shards=st.integers(2, 64), seconds=st.floats(10, 1000))
def test_a_starved_node_says_no_more_in_a_minute_however_many_shards_there_are(shards, seconds):
    pool = Pool([0] * shards)
    pool.want(GROUP)
    while pool.now < seconds:
        pool.wait(GROUP, 1)
        if pool.asking.turn_at == math.inf:
            break
    # A turn: what it takes back, LOOKS - 1 looks, each with an answer, and one place to stand.
    assert pool.messages <= (2 * LOOKS + 1) * (3 + seconds / TURN_LATER_S)


def test_groups_are_asked_of_as_many_shards_from_the_home_on():
    asking = Asking(4, GROUP, home=2)
    assert asking.wants(3 * GROUP - 1, 0.0) == [Ask(2, GROUP, True), Ask(3, GROUP, True), Ask(0, GROUP, True)]
    assert asking.wants(3 * GROUP, 0.0) == []
    for shard in (2, 3, 0):
        asking.granted(shard, GROUP)
    assert asking.wants(5 * GROUP, 0.0) == [Ask(1, GROUP, True), Ask(2, 2 * GROUP, True)]


def test_one_buffer_hears_every_total_and_keeps_it():
    asking = Asking(1, GROUP)
    assert asking.wants(5, 0.0) == [Ask(0, 5, False)]
    assert asking.wants(5, 0.0) == []
    assert asking.wants(7, 0.0) == [Ask(0, 7, False)]
    assert asking.turn_at == math.inf


def test_a_newer_policy_brings_the_next_look_forward():
    pool = Pool([0] * 8)
    pool.want(GROUP)
    assert pool.asking.turn_at == TURN_FIRST_S
    pool.wait(GROUP, 1)
    assert pool.asking.turn_at == TURN_FIRST_S + TURN_LATER_S
    pool.now = 1.0
    pool.asking.flipped(pool.now)
    assert pool.asking.turn_at == 1.0 + TURN_FIRST_S


def test_who_stands_at_every_shard_does_not_look_around():
    pool = Pool([0, 0])
    pool.want(2 * GROUP)
    assert set(pool.stands) == {0, 1}
    assert pool.asking.turn_at == math.inf
    pool.opens(1, 1)
    assert pool.granted == [0, GROUP]


def test_a_shard_that_does_not_answer_is_not_waited_for_and_asked_again_when_it_is_another_one():
    pool = Pool([1, 1], silent=frozenset({0}))
    pool.want(GROUP)
    assert pool.granted == [0, 0]
    pool.now = SILENT_S + 0.1
    pool.want(GROUP)
    assert pool.granted == [0, GROUP]
    pool.silent = frozenset()
    pool.asking.restarted(0)
    pool.want(2 * GROUP)
    assert pool.granted == [GROUP, GROUP]


def test_what_a_shard_counts_otherwise_is_believed():
    """It granted what never came: what is asked for goes on from its count, or nothing would be granted any more."""
    asking = Asking(2, GROUP, home=0)
    assert asking.wants(GROUP, 0.0) == [Ask(0, GROUP, True)]
    asking.refused(0, GROUP)
    assert asking.wants(GROUP, 0.0) == [Ask(1, GROUP, True)]
    asking.granted(1, GROUP)
    assert asking.wants(2 * GROUP, 0.0) == [Ask(0, 2 * GROUP, True)]

"""Who pulls from whom: whatever nodes do, everyone is served, no source by more than it may, and nobody by itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.version import PolicyId
from buffer.relays import LAST_TRY, STORE, Grant, Relays

HERE, ANYWHERE = "here", "tcp://10.0.0.1:1"
TIMEOUT_S = 3.0


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"{version:064x}")


P = policy(1)


def relays(fanout: int, volunteers: int, leaves: int = 0) -> Relays:
    made = Relays(fanout, TIMEOUT_S)
    for index in range(volunteers):
        made.joined(f"v{index}", HERE, ANYWHERE)
    for index in range(leaves):
        made.joined(f"l{index}", HERE, "")
    return made


def sources(made: Relays) -> dict[str, str | None]:
    return {name: made.source(name, P) for name in made.names}


# --- examples --------------------------------------------------------------------------------------------------------


def test_the_tree_is_filled_from_the_store_down_and_each_level_in_turn() -> None:
    made = relays(2, 7)
    grants = [made.ask(f"v{index}", P, 0.0) for index in range(7)]
    assert [each.source for (each,) in grants] == [STORE, STORE, "v0", "v1", "v0", "v1", "v2"]


@pytest.mark.parametrize(("nodes", "fanout"), [(16, 3), (500, 3), (500, 8), (50, 1)])
def test_whatever_the_size_of_the_pool_the_store_sends_no_more_than_its_fanout(nodes: int, fanout: int) -> None:
    made = relays(fanout, nodes)
    given = [grant for index in range(nodes) for grant in made.ask(f"v{index}", P, 0.0)]
    assert [grant.source for grant in given].count(STORE) == fanout
    for index in range(nodes):
        assert made.pulled(f"v{index}", P, 1.0) == []
    made.joined("late", HERE, "")
    assert made.ask("late", P, 2.0)[0].source != STORE, "those that are done are as good"


def test_without_a_volunteer_everybody_is_served_by_the_store() -> None:
    made = relays(2, 0, 9)
    assert {made.ask(f"l{index}", P, 0.0)[0].source for index in range(9)} == {STORE}


def test_leaves_that_ask_first_leave_a_place_at_the_store_for_who_makes_more() -> None:
    made = relays(2, 1, 4)
    assert made.ask("l0", P, 0.0) == [Grant("l0", P, STORE)]
    assert made.ask("l1", P, 0.0) == []
    assert made.ask("l2", P, 0.0) == []
    assert made.ask("v0", P, 0.1) == [Grant("v0", P, STORE), Grant("l1", P, "v0"), Grant("l2", P, "v0")]
    assert made.ask("l3", P, 0.2) == []
    assert made.pulled("l1", P, 0.3) == [Grant("l3", P, "v0")]


def test_who_finds_no_room_is_served_by_the_store_after_one_time_out() -> None:
    made = relays(1, 1, 2)
    made.ask("v0", P, 0.0)
    assert made.ask("l0", P, 0.0) == [Grant("l0", P, "v0")]
    assert made.ask("l1", P, 1.0) == []
    assert made.tick(1.0 + TIMEOUT_S - 0.01) == []
    assert made.tick(1.0 + TIMEOUT_S) == [Grant("l1", P, STORE)]


def test_a_silent_relay_gets_no_new_children_and_its_child_another_source_at_once() -> None:
    made = relays(2, 4)
    for index in range(4):
        made.ask(f"v{index}", P, 0.0)
    assert sources(made) == {"v0": STORE, "v1": STORE, "v2": "v0", "v3": "v1"}
    assert made.ask("v2", P, 3.0, "v0", "silent") == [Grant("v2", P, "v1")]
    made.joined("late", HERE, "")
    made.joined("later", HERE, "")
    assert [made.ask(name, P, 3.0)[0].source for name in ("late", "later")] == ["v2", "v3"]
    assert made.bypasses == {"silent": 1}


def test_after_a_few_relays_that_failed_it_is_the_store() -> None:
    made = relays(1, 5)
    for index in range(5):
        made.ask(f"v{index}", P, 0.0)
        made.pulled(f"v{index}", P, 0.1)
    made.joined("new", HERE, "")
    (grant,) = made.ask("new", P, 1.0)
    for _ in range(LAST_TRY):
        assert grant.source != STORE
        (grant,) = made.ask("new", P, 2.0, grant.source, "gone")
    assert grant.source == STORE


def test_one_who_cries_wolf_is_believed_for_itself_and_two_for_all() -> None:
    made = relays(2, 1)
    made.ask("v0", P, 0.0)
    made.pulled("v0", P, 0.1)
    for name in "abc":
        made.joined(name, HERE, "")
    assert [made.ask(name, P, 1.0)[0].source for name in "ab"] == ["v0", "v0"]
    assert made.ask("a", P, 1.1, "v0", "damaged") == [Grant("a", P, STORE)]
    assert made.ask("c", P, 1.2) == [Grant("c", P, "v0")]
    assert made.ask("b", P, 1.3, "v0", "damaged") == [Grant("b", P, STORE), Grant("c", P, STORE)]
    assert made.liars == ["v0"]
    assert made.volunteers == []
    made.joined("v0", HERE, ANYWHERE)  # another process of that name
    assert made.volunteers == ["v0"]


def test_nobody_can_accuse_a_relay_that_it_never_had() -> None:
    made = relays(2, 3)
    for index in range(3):
        made.ask(f"v{index}", P, 0.0)
    for name in ("v0", "v1"):
        made.ask(name, P, 0.1, "v2", "damaged")
    assert made.liars == []
    assert not made.bypasses


def test_when_a_relay_is_lost_its_children_move_and_nobody_else() -> None:
    made = relays(2, 14)
    for index in range(14):
        made.ask(f"v{index}", P, 0.0)
    before = sources(made)
    children = [name for name, source in before.items() if source == "v0"]
    grants = made.left("v0", 1.0)
    assert sorted(grant.node for grant in grants) == sorted(children)
    del before["v0"]
    assert {name for name, source in sources(made).items() if source != before[name]} == set(children)


def test_a_straggler_below_a_slow_relay_is_taken_over_by_the_store() -> None:
    made = relays(2, 6)
    for index in range(6):
        made.ask(f"v{index}", P, 0.0)
    for name in ("v0", "v1", "v3"):
        made.pulled(name, P, 1.0)
    assert made.tick(2.0 + 2 * TIMEOUT_S) == []
    assert {grant.node for grant in made.tick(2.1 + 2 * TIMEOUT_S)} == {"v2", "v4"}, "as many as the store may serve"
    assert made.bypasses == {"slow": 2}


def test_a_relay_has_the_last_files_that_it_asked_for_and_no_older_ones() -> None:
    made = relays(1, 1, 1)
    for version in range(6):
        made.ask("v0", policy(version), 0.0)
        made.pulled("v0", policy(version), 0.0)
    for version in range(2, 6):
        assert made.ask("l0", policy(version), 1.0)[0].source == "v0"
    assert made.ask("l0", policy(1), 1.0) == [Grant("l0", policy(1), STORE)]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5", "ipc:///tmp/s"])
def test_a_relay_on_loopback_is_for_its_own_place(endpoint: str) -> None:
    assert second_source("there", endpoint) is None
    assert second_source(HERE, endpoint) == "v0"


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.7:5", "tcp://node-7:5", "tcp://[fd00::1]:5"])
def test_a_relay_at_an_address_is_for_everybody(endpoint: str) -> None:
    assert second_source("there", endpoint) == "v0"


def second_source(place: str, endpoint: str) -> str | None:
    """Of a node at `place` that asks after the only relay, which has the store's only room."""
    made = Relays(1, TIMEOUT_S)
    made.joined("v0", HERE, endpoint)
    made.joined("l0", place, "")
    made.ask("v0", P, 0.0)
    made.ask("l0", P, 0.0)
    return made.source("l0", P)


def test_what_a_push_to_many_nodes_costs_the_store_is_milliseconds_a_node() -> None:
    """500 nodes, of which one in ten relays, took 35 CPU-seconds when all were looked at for each that waits."""
    nodes = 500
    made = Relays(3, TIMEOUT_S)
    for index in range(nodes):
        made.joined(f"v{index}", HERE, "" if index % 10 else ANYWHERE)
    started = time.thread_time()
    has = [grant.node for index in range(nodes) for grant in made.ask(f"v{index}", P, 0.0)]
    for name in has:  # grows meanwhile
        has += [grant.node for grant in made.pulled(name, P, 1.0)]
    assert sorted(has) == sorted(made.names)
    assert time.thread_time() - started < 0.01 * nodes


# --- whatever nodes do -----------------------------------------------------------------------------------------------

NODES = [f"n{index}" for index in range(12)]


class Pool(RuleBasedStateMachine):
    """Nodes that join, ask, finish, complain and leave in any order; every grant is checked when it is made."""

    @initialize(fanout=st.integers(1, 4), volunteers=st.sets(st.sampled_from(NODES)))
    def begin(self, fanout: int, volunteers: set[str]) -> None:
        self.relays = Relays(fanout, TIMEOUT_S)
        self.fanout, self.now = fanout, 0.0
        self.asked: dict[str, tuple[PolicyId, float]] = {}  # of those that pull or wait
        self.complained: dict[str, set[str]] = {}
        for name in NODES:
            self.relays.joined(name, HERE, ANYWHERE if name in volunteers else "")

    def check(self, grants: list[Grant]) -> None:
        for node, what, source in grants:
            assert node in self.asked, "a grant for one that asked for nothing"
            assert self.asked[node][0] == what
            assert source != node
            assert source == STORE or source in self.relays.volunteers
            assert source not in self.complained[node]

    @rule(name=st.sampled_from(NODES), version=st.integers(0, 2))
    def ask(self, name: str, version: int) -> None:
        self.asked[name], self.complained[name] = (policy(version), self.now), set()
        self.check(self.relays.ask(name, policy(version), self.now))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), trouble=st.sampled_from(["silent", "unreachable", "gone", "damaged"]))
    def complain(self, data: Any, trouble: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        what, _ = self.asked[name]
        source = self.relays.source(name, what)
        if source:
            self.complained[name].add(source)
            self.check(self.relays.ask(name, what, self.now, source, trouble))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        what, _ = self.asked.pop(name)
        if self.relays.source(name, what) is not None:
            self.check(self.relays.pulled(name, what, self.now))
        else:
            self.asked[name] = (what, self.now)

    @rule(name=st.sampled_from(NODES), gone=st.booleans())
    def leave(self, name: str, gone: bool) -> None:
        if gone:
            self.asked.pop(name, None)
            self.check(self.relays.left(name, self.now))
        else:
            self.check(self.relays.lost(name, self.now))

    @rule(name=st.sampled_from(NODES), volunteers=st.booleans())
    def join(self, name: str, volunteers: bool) -> None:
        self.relays.back(name)
        if name not in self.relays.names:
            self.relays.joined(name, HERE, ANYWHERE if volunteers else "")

    @rule(seconds=st.sampled_from([0.1, 1.0, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.check(self.relays.tick(self.now))

    @invariant()
    def no_relay_serves_more_than_it_may(self) -> None:
        for what in {what for what, _ in self.asked.values()}:
            at = [self.relays.source(name, what) for name, (its, _) in self.asked.items() if its == what]
            assert all(at.count(source) <= self.fanout for source in at if source)

    @invariant()
    def nobody_waits_for_itself(self) -> None:
        for name, (what, _) in self.asked.items():
            seen: list[str] = []
            at: str | None = name
            while at and at in self.asked and self.asked[at][0] == what:
                assert at not in seen, f"a ring: {seen}"
                seen.append(at)
                at = self.relays.source(at, what)

    @invariant()
    def nobody_waits_for_room_for_longer_than_a_time_out(self) -> None:
        for name, (what, since) in self.asked.items():
            if self.relays.source(name, what) is None:
                self.check(self.relays.tick(self.now)) if self.now >= since + TIMEOUT_S else None
                assert self.relays.source(name, what) is not None or self.now < since + TIMEOUT_S


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)

"""A buffer of several shards asks and lends what one buffer would; and a shard is known by its lease."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.buffer_config import BufferConfig, check_buffer
from async_rl.config import ConfigError, load_config
from async_rl.shards import home_shard, shard_of, split_dispositions, whole_batch
from async_rl.version import PolicyId
from async_rl.wire.messages import BatchGroup, Disposition, Lease
from buffer.events import BufferStarted, EndRun, GrantLease, NodeAttested, NodeJoined, NodeWanted, NothingFree
from buffer.events import PolicyRegistered as Registered
from buffer.leases import Leases
from buffer.nodes import Nodes
from buffer.replay import Replay
from buffer.rules import of_shard, rules_from_config

POLICY = PolicyId("main", 0, "d0")


def asked_of(replay: Replay, total: int, once: bool = False) -> list[object]:
    for event in (NodeJoined("a", 8), Registered(POLICY), NodeAttested("a", POLICY)):
        replay.apply(event, 0.0)
    return replay.apply(NodeWanted("a", total, once), 0.0)


def leases_of(effects: list[object]) -> list[Lease]:
    return [effect.lease for effect in effects if isinstance(effect, GrantLease)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.sampled_from([1, 2, 3, 4, 16]), part=st.integers(1, 4), bound=st.integers(0, 4),
    size=st.integers(1, 9), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_the_shards_of_a_run_ask_for_each_ticket_what_one_buffer_would_and_for_no_other(
    tools, shards, part, bound, size, seed
):
    whole = tools.rules(run_seed=seed, groups_per_step=part * shards, group_size=size, max_staleness=bound)
    one = leases_of(asked_of(Replay(whole), 10**6))
    rules = whole._replace(shards=shards)
    several = [
        leases_of(asked_of(Replay(of_shard(rules, shard)), 10**6)) for shard in range(shards)
    ]
    said = [(each.ticket, each.try_, each.instance, each.samples, each.seeds, each.min_version) for each in one]
    assert sorted(
        (each.ticket, each.try_, each.instance, each.samples, each.seeds, each.min_version)
        for leases in several
        for each in leases
    ) == said
    assert [ticket for ticket, *_ in said] == list(range((bound + 1) * part * shards))  # what admission allows
    for shard, leases in enumerate(several):
        assert {each.ticket % shards for each in leases} == {shard}
        assert {shard_of(each.lease, shards) for each in leases} == {shard}
    numbers = [each.lease for leases in several for each in leases]
    assert len(set(numbers)) == len(numbers)


@given(step=st.integers(1, 5), count=st.integers(0, 600), data=st.data())
def test_a_shard_finds_its_own_leases_by_their_numbers_and_no_others(step, count, data):
    first = data.draw(st.integers(0, step - 1))
    leases, node = Leases(10.0, first, step), Nodes().joined("a", 8)
    for ticket in range(count):
        leases.grant(node, ticket, 0, now=float(ticket))
    assert list(leases.open) == [first + step * place for place in range(count)]
    for number in range(step * count + step):
        lease = leases.find(number)
        mine = number % step == first and number // step < count
        assert (lease is not None and lease.lease == number) == mine == leases.was_issued(number)
    assert [lease.ticket for lease in leases.expired(now=100.0)] == list(range(min(count, 91)))
    again = Leases(10.0, first, step)
    again.resume_at(leases.next_lease)
    assert again.next_lease == leases.next_lease


def test_who_asks_once_is_given_what_there_is_and_told_when_there_is_no_more(tools):
    rules = of_shard(tools.rules(groups_per_step=4, shards=2, max_staleness=0), 1)
    replay = Replay(rules)
    granted = asked_of(replay, 100, once=True)
    assert [lease.ticket for lease in leases_of(granted)] == [1, 3]
    assert granted[-1] == NothingFree("a", 4)
    # What could not be granted is forgotten: a newer policy brings nothing to a node that has gone elsewhere.
    newer = PolicyId("main", 1, "d1")
    replay.apply(Registered(newer), 0.0)
    assert leases_of(replay.apply(NodeAttested("a", newer), 0.0)) == []
    assert len(leases_of(replay.apply(NodeWanted("a", 6), 0.0))) == 1
    # And a demand that stands is taken back by asking once more for what was asked.
    replay.apply(NodeWanted("a", 100), 0.0)
    assert replay.apply(NodeWanted("a", 100, True), 0.0) == [NothingFree("a", 8)]
    assert replay.nodes_view()["a"].wanted == 8


def test_a_journal_of_other_shards_is_refused_with_what_to_do(tools):
    replay = Replay(of_shard(tools.rules(groups_per_step=4, shards=2), 0))
    (ended,) = replay.apply(BufferStarted(of_shard(tools.rules(groups_per_step=4, shards=4), 0)), 0.0)
    assert isinstance(ended, EndRun)
    assert "one of 2 shards, and buffer.shards is 4" in ended.error
    assert "resume with buffer.shards = 2" in ended.error


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(1, 3)), unique_by=lambda each: each[0]))
def test_a_batch_of_parts_is_in_the_order_of_its_tickets_with_each_groups_own_payloads(groups):
    parts = [
        [BatchGroup(ticket, 0, 0, size, uses=uses) for ticket, uses, size in groups if ticket % 3 == shard]
        for shard in range(3)
    ]
    drawn = [(part, [(each.ticket, place) for each in part for place in range(each.size)]) for part in parts]
    whole, payloads = whole_batch(drawn)
    assert whole == sorted(whole, key=lambda each: (each.uses > 0, each.ticket))
    assert payloads == [(each.ticket, place) for each in whole for place in range(each.size)]


def test_what_came_as_a_bundle_counts_as_its_attempts_in_a_batch_of_parts():
    drawn = [
        ([BatchGroup(0, 0, 0, 3), BatchGroup(2, 0, 0, 2)], ["aaa", "b", "c"]),
        ([BatchGroup(1, 0, 0, 4)], ["ddd", "e"]),
    ]
    groups, payloads = whole_batch(drawn, attempts_in=len)
    assert [group.ticket for group in groups] == [0, 1, 2]
    assert payloads == ["aaa", "ddd", "e", "b", "c"]
    for wrong in (["aaa", "bbb"], ["aa", "b", "c"], ["aaa", "b", "c", "d"]):
        with pytest.raises(ValueError, match="trajectories declared"):
            whole_batch([(drawn[0][0], wrong), drawn[1]], attempts_in=len)
    with pytest.raises(ValueError, match="a payload of 2 trajectories is not of one group"):
        whole_batch([(drawn[0][0], ["aa", "bb", "c"]), drawn[1]], attempts_in=len)


def test_parts_that_do_not_hold_what_they_declare_are_refused():
    with pytest.raises(ValueError, match="2 trajectories declared, 1 received"):
        whole_batch([([BatchGroup(0, 0, 0, 2)], [b""]), ([BatchGroup(1, 0, 0, 1)], [b""])])


def test_dispositions_go_to_the_shards_of_their_leases():
    said = [Disposition(lease, (0,), "trained") for lease in range(7)]
    assert [[each.lease for each in part] for part in split_dispositions(said, 3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_homes_are_spread_over_the_shards():
    homes = [home_shard(f"node-{number}", 4) for number in range(400)]
    assert all(60 < homes.count(shard) < 140 for shard in range(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups_per_step": 6}, "shards = 4 does not divide groups_per_step = 6"),
        ({"groups_per_step": 8, "order": "windowed", "window": 6}, "does not divide window = 6"),
        ({"groups_per_step": 8, "order": "replay", "reuse": 4}, "does not divide the 2 new groups of a batch"),
    ],
)
def test_what_cannot_be_shared_out_equally_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_buffer(BufferConfig(shards=4, **settings))


def test_a_shards_rules_are_its_part_of_the_configs():
    buffer = BufferConfig(shards=4, groups_per_step=8, order="windowed", window=16)
    config = msgspec.structs.replace(load_config("quickstart"), buffer=buffer)
    whole = rules_from_config(config)
    part = of_shard(whole, 3)
    assert (part.groups_per_step, part.window, part.capacity_bytes) == (2, 4, whole.capacity_bytes // 4)
    assert (part.lead, part.steps, part.shard) == (whole.lead, whole.steps, 3)

"""Epochs in the buffer: a ticket asks its own instance first, however often leases, nodes, shards and buffers die."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from async_rl.buffer_config import PoolsConfig
from async_rl.config import Config, ConfigError
from async_rl.data.order import Source, asked, place_of
from buffer.events import BufferStarted, NodeLost, PolicyRegistered, Resumed
from buffer.instances import Instances, pool_weight
from buffer.rules import rules_from_config
from buffer.snapshot import dump, load

NO_PAYLOAD = memoryview(b"")  # a snapshot has none
SOURCES = (Source(11, 2, 0), Source(23, 3, 5))


def check(rules, leases) -> None:
    for lease in leases:
        first = asked(rules.run_seed, SOURCES, lease.ticket)
        if lease.try_ == 0:
            assert lease.instance == first
        assert place_of(SOURCES, lease.instance).source == place_of(SOURCES, first).source


@settings(
    deadline=None, max_examples=10, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(seed=st.integers(0, 10**6), shards=st.sampled_from([1, 2]))
def test_every_ticket_asks_its_own_instance_whoever_dies(tools, seed, shards):
    """A node that delivers, or is lost; groups of equal rewards, which ask something else; a buffer that is killed, and
    one that has lost its journal. At the end every ticket was asked, and so an epoch has lost nothing."""
    chance = random.Random(seed)
    play = tools.play(
        steps=6, groups_per_step=4 // shards, shards=shards, shard=chance.randrange(shards), sources=SOURCES,
        zero_variance="refill", max_tries=1000,
    )  # fmt: skip
    rules, asked_first, held = play.rules, {}, []

    def watched(event):
        effects = play.replay.apply(event, play.now)
        new = tools.leases(effects)
        check(rules, new)
        asked_first.update({lease.ticket: lease.instance for lease in new if lease.try_ == 0})
        held.extend(new)
        return effects

    play.apply = watched
    play.node("node-0")
    life = 0
    for _ in range(400):
        if play.replay.confirmed_batches == rules.steps:
            break
        match chance.choice(["deliver"] * 8 + ["lost", "killed"]):
            case "deliver" if held:
                lease = held.pop(chance.randrange(len(held)))
                equal = chance.random() < 0.2
                for sample in lease.samples:
                    reward = 1.0 if equal else float(sample)
                    play.result(lease, sample, f"node-{life}", reward=reward, payload=NO_PAYLOAD)
            case "lost":
                held.clear()
                play.apply(NodeLost(f"node-{life}", "test"))
                life += 1
                play.node(f"node-{life}")
            case "killed":
                play.replay = load(dump(play.replay), rules)
        if play.draw():
            play.confirm()
            play.attest(f"node-{life}")
        play.want(f"node-{life}", 10**6)
    assert not play.replay.ended
    assert play.replay.confirmed_batches == rules.steps
    tickets = [rules.ticket(local) for local in range(rules.steps * rules.groups_per_step)]
    assert sorted(asked_first) == tickets


def test_without_its_journal_a_run_goes_on_with_the_instances_that_are_left(tools):
    play = tools.play(sources=SOURCES, max_staleness=3, zero_variance="refill")
    leases = play.node("a", 16)
    play.deliver(leases[3], reward=1.0)  # it asks something else
    for lease in leases[:2]:
        play.deliver(lease)
    play.draw()
    play.confirm()
    progress = play.replay.progress()
    resumed = tools.play(sources=SOURCES, max_staleness=3)
    resumed.policies = play.policies
    resumed.apply(Resumed(progress))
    resumed.apply(PolicyRegistered(play.policies[-1]))
    left = resumed.node("b", 10**6)
    assert [(lease.ticket, lease.try_) for lease in left] == [(n, int(n == 3)) for n in range(2, 10)]
    check(resumed.rules, left)


def test_an_order_is_of_its_sources_and_a_run_cannot_go_on_with_others(tools):
    play = tools.play(sources=SOURCES)
    others = (*SOURCES[:1], SOURCES[1]._replace(size=24))
    (ended,) = tools.errors(play.apply(BufferStarted(play.rules._replace(sources=others))))
    assert "sources was" in ended


# --- with a history --------------------------------------------------------------------------------------------------


def test_what_is_retired_is_asked_for_no_more_and_another_of_its_source_is(tools):
    rules = tools.rules(sources=SOURCES, instances=34, retire_above=0.9, retire_after=4)
    instances = Instances(rules)
    tickets = range(55)
    assert [instances.choose(ticket, 0) for ticket in tickets] == [asked(7, SOURCES, ticket) for ticket in tickets]
    retired = {3, 4, 5, 20, 21, 22, 23}
    for instance in retired:
        for _ in range(4):
            instances.note(instance, 1.0)
    for ticket in tickets:
        first, chosen = asked(7, SOURCES, ticket), instances.choose(ticket, 0)
        assert chosen not in retired
        assert first in retired or chosen == first
        assert place_of(SOURCES, chosen).source == place_of(SOURCES, first).source


POOLS = PoolsConfig(hard_below=0.25, easy_above=0.75, hard=0.5, normal=2.0, easy=0.0)


@pytest.mark.parametrize(
    ("passed", "attempts", "weight"),
    [(0, 0, 2.0), (0, 4, 0.5), (0.9, 4, 0.5), (1, 4, 2.0), (3, 4, 2.0), (3.1, 4, 0.0), (4, 4, 0.0)],
)
def test_an_instance_is_hard_normal_or_easy_by_its_pass_rate(passed, attempts, weight):
    assert pool_weight(passed, attempts, POOLS) == weight


def test_instances_are_asked_in_proportion_to_the_weights_of_their_pools(tools):
    rules = tools.rules(instances=4, pools=POOLS)
    instances = Instances(rules)
    for instance, rewards in enumerate([[], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]):
        for reward in rewards:
            instances.note(instance, reward)
    rounds = 6000
    counts = [0] * 4
    for ticket in range(rounds):
        counts[instances.choose(ticket, 0)] += 1
    for count, share in zip(counts, [2 / 4.5, 0.5 / 4.5, 2 / 4.5, 0], strict=True):
        assert abs(count / rounds - share) <= 4 * (share * (1 - share) / rounds) ** 0.5
    for _ in range(8):
        instances.note(3, 0.0)  # and what was easy is normal again
    assert 3 in {instances.choose(ticket, 0) for ticket in range(50)}


# --- from a config ---------------------------------------------------------------------------------------------------


def config(buffer, **task) -> Config:
    return Config(buffer=type(Config().buffer)(**buffer), task={"kind": "digit_sort", **task})


def test_any_finite_task_can_be_gone_through_in_epochs():
    assert rules_from_config(config({"epochs": True}, size=50)).sources == (Source(50, 1, 0),)
    assert rules_from_config(config({}, size=50)).sources == ()
    with pytest.raises(ConfigError, match="has no end to its training instances: give it a size"):
        rules_from_config(config({"epochs": True}))


def test_pools_are_rules_and_need_instances_that_can_be_counted():
    pools = PoolsConfig(easy=0.0)
    rules = rules_from_config(config({"difficulty": "pools", "pools": pools}, size=50))
    assert (rules.pools, rules.instances, rules.weighted) == (pools, 50, False)
    with pytest.raises(ConfigError, match='difficulty = "pools" need a history'):
        rules_from_config(config({"difficulty": "pools"}))


def test_shards_ask_what_one_buffer_would(tools):
    whole = tools.rules(groups_per_step=4, sources=SOURCES, max_staleness=4)
    found = {}
    for shard in range(2):
        play = tools.play(
            groups_per_step=2, sources=SOURCES, max_staleness=4, shards=2, shard=shard, capacity_bytes=10**9
        )
        found |= {lease.ticket: lease.instance for lease in play.node("a", 10**6)}
    assert found == {ticket: asked(whole.run_seed, SOURCES, ticket) for ticket in range(20)}

"""The order `replay`: groups that train again, how often, how old, and what the books say of it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.buffer_config import BufferConfig, batches_held
from async_rl.wire.messages import Lease, dispositions_of
from buffer.events import BatchConfirmed, LendBatch, Resumed
from buffer.reuse import age_weight, choose
from buffer.scenario import Constant, Lognormal, Scenario, TrainerSpeed
from buffer.simulate import Simulation


def step(play) -> LendBatch:
    """One batch sampled, drawn and confirmed by a node and a trainer that keep up."""
    for lease in play.attest("a") + play.want("a", 10**6):
        play.deliver(lease)
    (batch,) = play.draw()
    play.confirm()
    return batch


def test_a_batch_is_fresh_groups_and_some_that_trained_before_none_more_often_than_allowed(tools):
    """B = 6, R = 3: two fresh groups a batch; from the third batch on it is full."""
    play = tools.play(groups_per_step=6, reuse=3, max_staleness=3, steps=10)
    play.node("a")
    uses = Counter()
    for number in range(10):
        batch = step(play)
        tickets = [group.ticket for group in batch.groups]
        assert tickets[:2] == [2 * number, 2 * number + 1]
        assert len(set(tickets)) == len(tickets) == min(6, 2 * (number + 1))
        assert [group.uses for group in batch.groups] == [uses[ticket] for ticket in tickets]
        uses.update(tickets)
    assert max(uses.values()) == 3
    assert play.replay.ledger["trained"] == 20 * 2
    assert play.replay.reused == {"trained": (10 * 6 - 20 - 4 - 2) * 2, "short_batches": 2}


def test_what_is_lent_again_is_the_same_payloads_and_what_is_lent_twice_the_same_batch(tools):
    play = tools.play(groups_per_step=2, reuse=2, max_staleness=2, steps=6)
    play.node("a")
    first = step(play)
    for lease in play.attest("a") + play.want("a", 10**6):
        play.deliver(lease)
    (second,) = play.draw()
    assert [(group.ticket, group.uses) for group in second.groups] == [(1, 0), (0, 1)]
    assert second.payloads[2:] == first.payloads
    assert play.draw() == [second]


def test_of_a_group_only_the_attempts_that_trained_are_used_again_and_never_fewer_than_two(tools):
    play = tools.play(groups_per_step=2, reuse=2, max_staleness=2, group_size=3, steps=6)
    play.node("a")
    for lease in play.want("a", 10**6):
        play.deliver(lease)
    for refused, left in ((1, 2), (2, 0)):
        (batch,) = play.draw()
        fresh = batch.payloads[: batch.groups[0].size]
        outcomes = dict.fromkeys([bytes(payload).decode() for payload in batch.payloads], "trained")
        outcomes |= dict.fromkeys([bytes(payload).decode() for payload in fresh[:refused]], "refused")
        attempts = [(int(name.split("/")[0]), int(name.split("/")[1])) for name in outcomes]
        dispositions = dispositions_of((*attempt, outcomes["{}/{}".format(*attempt)]) for attempt in attempts)
        play.publish()
        play.apply(BatchConfirmed(batch.batch, dispositions))
        for lease in play.attest("a") + play.want("a", 10**6):
            play.deliver(lease)
        (following,) = play.draw()
        assert [group.size for group in following.groups[1:]] == ([left] if left else [])
    assert play.replay.ledger["dropped.refused"] == 3
    assert play.replay.reused == {"trained": 2, "short_batches": 1}


def test_without_the_journal_a_resumed_run_begins_with_smaller_batches_and_goes_on_counting(tools):
    play = tools.play(groups_per_step=2, reuse=2, max_staleness=2, steps=6)
    play.node("a")
    step(play)
    step(play)
    progress = play.replay.progress()
    again = tools.play(groups_per_step=2, reuse=2, max_staleness=2, steps=6)
    again.policies = play.policies
    assert tools.errors(again.apply(Resumed(progress))) == []
    again.publish()
    again.node("a")
    assert [group.ticket for group in step(again).groups] == [2]
    assert len(step(again).groups) == 2
    assert again.replay.reused == {"trained": 4, "short_batches": 2}


def test_what_may_be_used_again_the_lent_batch_and_the_next_one_take_the_room_that_the_configuration_demands(tools):
    """B = 3, R = 2 and so F = 2, K = 1, payloads of the promised size: two groups may be used again, two are lent, and
    two are sampled without credit, whatever the capacity."""
    play = tools.play(groups_per_step=3, reuse=2, max_staleness=1, steps=6, capacity_bytes=1)
    most = 0

    def sample(leases: list[Lease]) -> None:
        nonlocal most
        while leases:
            most = max(most, play.replay.groups.credit.held_bytes)
            leases += tools.leases(play.deliver(leases.pop(), payload=memoryview(bytes(500))))

    sample(play.node("a", 10**6))
    for _ in range(4):
        assert play.draw()
        newest = play.publish()
        sample(play.attest("a"))
        play.policies.remove(newest)
        play.confirm()
    buffer = BufferConfig(order="replay", groups_per_step=3, reuse=2, max_staleness=1)
    assert most == batches_held(buffer) * 2 * 1000


@settings(max_examples=60, derandomize=True)
@given(st.dictionaries(st.integers(0, 10**6), st.integers(0, 8)), st.integers(0, 12), st.integers(0, 9))
def test_a_choice_is_of_different_groups_as_many_as_there_are_and_always_the_same(ages, count, batch):
    chosen = choose(ages, count, 7, batch)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= ages.keys()
    assert len(chosen) == min(count, len(ages))
    assert choose(dict(reversed(ages.items())), count, 7, batch) == chosen


def test_groups_are_chosen_in_proportion_to_the_weights_of_their_ages():
    """The first of one draw, over many batches: with probability weight / sum of weights, within four standard
    errors; and two of three without replacement, by summing over both orders."""
    ages = {3: 0, 5: 1, 8: 3}
    weights = {ticket: 1 / (1 + age) for ticket, age in ages.items()}
    total, rounds = sum(weights.values()), 6000
    assert all(weights[ticket] == age_weight(age) for ticket, age in ages.items())
    ones = Counter(ticket for batch in range(rounds) for ticket in choose(ages, 1, 1, batch))
    pairs = Counter(tuple(choose(ages, 2, 2, batch)) for batch in range(rounds))
    expected = {(ticket,): weight / total for ticket, weight in weights.items()}
    for a, b in ((3, 5), (3, 8), (5, 8)):
        expected[a, b] = sum(weights[x] / total * weights[y] / (total - weights[x]) for x, y in ((a, b), (b, a)))
    for tickets, probability in expected.items():
        seen = ones[tickets[0]] if len(tickets) == 1 else pairs[tickets]
        assert abs(seen / rounds - probability) < 4 * math.sqrt(probability * (1 - probability) / rounds)


@pytest.mark.parametrize(("groups", "reuse", "bound"), [(2, 2, 1), (3, 2, 4), (6, 3, 2), (7, 4, 5), (5, 5, 4)])
def test_batches_are_as_large_as_the_proof_says_under_a_virtual_clock_with_faults(tools, groups, reuse, bound):
    """Every size, every group's uses, and the age of every group in every batch."""
    rules = tools.rules(
        steps=40, groups_per_step=groups, reuse=reuse, max_staleness=bound, zero_variance="refill", max_tries=100
    )
    scenario = Scenario(
        seed=reuse, nodes=4, slots=3, lengths=Lognormal(30, 1), slowest=3, push_s=Lognormal(0.5, 1), zero_variance=0.5,
        trainer=TrainerSpeed(Constant(1.0)), node_life_s=60, env_failed=0.05,
    )  # fmt: skip
    simulation = Simulation(rules, scenario, lambda replay, now: tools.audit(replay))
    batches: list[LendBatch] = []
    lend = simulation._trainer.lend
    simulation._trainer.lend = lambda batch: (batches.append(batch), lend(batch))[1]
    result = simulation.run()
    assert (result.error, result.steps) == ("", 40)
    fresh = math.ceil(groups / reuse)
    uses = Counter()
    for number, batch in enumerate(batches):
        assert min(groups, fresh * (1 + min(number, reuse - 1))) <= len(batch.groups) <= groups
        assert sum(group.uses == 0 for group in batch.groups) == fresh
        ages = [number - run.version for payload in batch.payloads for run in payload.versions]
        assert max(ages) <= bound
        uses.update(group.ticket for group in batch.groups)
    assert max(uses.values()) <= reuse
    assert result.ledger["trained"] == len(uses) * rules.group_size == 40 * fresh * rules.group_size
    assert result.reused.get("trained", 0) == (uses.total() - len(uses)) * rules.group_size
    assert result.reused["short_batches"] == sum(len(batch.groups) < groups for batch in batches) <= reuse - 1

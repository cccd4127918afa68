"""The rules as a whole, under a virtual clock and with everything going wrong: bound, ledger, no deadlock."""

from __future__ import annotations

import math
import struct
from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.bundled import alone
from buffer.events import BundleArrived
from buffer.rules import ENDLESS, Rules
from buffer.scenario import Constant, Lognormal, Scenario, Speed, TrainerSpeed, Values
from buffer.simulate import SimulationResult, simulate
from buffer.virtual_results import Outcomes, taken_apart

GROUP_BYTES = 1000
FAULTS = ("refused", "env_failed", "aborted", "hangs", "zero_variance", "skipped", "undead")


@st.composite
def worlds(draw: st.DrawFn, faults: bool = True, shards: int = 1) -> tuple[dict[str, object], Scenario]:
    """Rules and a scenario: every number that matters, small enough that rare coincidences are common. `groups` and the
    window are each shard's; the rules are the run's."""
    bound = draw(st.sampled_from([0, 1, 4]))
    groups = draw(st.integers(1, 4))
    window = draw(st.integers(1, bound * groups + 1 if shards == 1 else max(1, bound * groups)))
    window *= shards if window > 1 else 1
    order: dict[str, int] = draw(
        st.sampled_from(
            [{"window": window}, {"newest_first": True}, {"reuse": draw(st.integers(1, min(bound + 1, groups)))}]
        )
    )
    if math.ceil(groups * shards / order.get("reuse", 1)) % shards:
        groups *= order["reuse"]  # async_rl.buffer_config.check_shards
    rules = {
        "run_seed": draw(st.integers(0, 2**32)),
        "steps": draw(st.integers(1, 12)),
        "groups_per_step": groups * shards,
        "shards": shards,
        "group_size": draw(st.integers(1, 3)),
        "max_staleness": bound,
        **order,
        "on_short_group": draw(st.sampled_from(["retry", "drop", "accept"])),
        "zero_variance": draw(st.sampled_from(["keep", "refill"])),
        "max_tries": 100,
        "capacity_bytes": shards * draw(st.sampled_from([1, GROUP_BYTES, groups * GROUP_BYTES, 10**9])),
        "group_bytes": GROUP_BYTES,
        "lease_timeout": 40.0,
    }
    chances = {fault: draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])) for fault in FAULTS} if faults else {}
    scenario = Scenario(
        seed=draw(st.integers(0, 2**32)),
        nodes=draw(st.integers(1, 5)),
        slots=draw(st.integers(1, 5)),
        lengths=Lognormal(20.0, draw(st.sampled_from([0.0, 0.5, 1.5]))),
        overhead_bytes=0.0,
        speed=draw(st.sampled_from([Speed(0.05), Speed(0.02, 0.01), Speed(tokens_per_second=50.0)])),
        slowest=draw(st.sampled_from([1.0, 5.0])),
        delivery_s=draw(st.sampled_from([Constant(0.0), Lognormal(0.1, 1.0)])),
        push_s=Lognormal(draw(st.sampled_from([0.01, 1.0, 10.0])), 1.0),
        trainer=TrainerSpeed(
            Lognormal(draw(st.sampled_from([0.01, 1.0, 10.0])), 0.5),
            export_s=Constant(draw(st.sampled_from([0.0, 0.1]))),
            upload_s=Constant(draw(st.sampled_from([0.0, 0.1]))),
        ),
        in_flight=draw(st.sampled_from(["finish", "continue", "recompute"])),
        whole_groups=draw(st.booleans()),
        joins=draw(st.sampled_from([(), ((5.0, 2),)])),
        node_life_s=draw(st.sampled_from([0.0, 15.0, 60.0])) if faults else 0.0,
        rejoin_s=draw(st.sampled_from([1.0, 10.0])),
        eval_every=draw(st.sampled_from([0, 3])),
        eval_n=5,
        eval_samples=draw(st.integers(1, 2)),
        eval_sets=draw(st.integers(1, 3)),
        **chances,
    )
    return rules, scenario


def must_hold(rules: Rules, result: SimulationResult) -> None:
    assert (result.error, result.steps) == ("", rules.steps)
    assert all(0 <= age <= rules.max_staleness for age in result.staleness)
    if rules.max_staleness == 0:
        assert set(result.staleness) == {0}
    # The guarantee does not rest on the sweep, which would hide a wrong admission or order: it finds nothing to drop.
    # Newest first is another matter: what it leaves behind is the sweep's.
    assert result.ledger["dropped.stale"] == 0 or rules.newest_first
    least = rules.fresh_groups * (1 + (rules.max_staleness + 1 if rules.reuse > 1 else 0))
    beside = (2 * rules.fresh_groups - rules.shards) * rules.newest_first  # buffer.capacity
    assert result.max_buffered_bytes <= max(rules.capacity_bytes, least * rules.group_bytes) + beside * GROUP_BYTES
    for evaluation in result.evaluations:
        rewards = struct.unpack(f"<{len(evaluation.rewards) // 8}d", evaluation.rewards)
        assert evaluation.n == sum(not math.isnan(reward) for reward in rewards)
        assert evaluation.n + evaluation.cancelled in (5, 10)
    for ledger, end in ((result.ledger, "trained"), (result.eval_ledger, "evaluated")):
        dropped = sum(count for place, count in ledger.items() if place.startswith("dropped."))
        assert ledger["issued"] == ledger[end] + dropped


@settings(
    max_examples=120, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(worlds())
def test_no_token_beyond_the_bound_no_deadlock_and_books_that_balance_after_every_event(tools, world):
    bound_ledger_and_liveness(tools, *world)


@pytest.mark.parametrize("shards", [2, 4])
@settings(
    max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_same_holds_of_several_shards_after_every_event_of_each(tools, shards, data):
    bound_ledger_and_liveness(tools, *data.draw(worlds(shards=shards)))


def bound_ledger_and_liveness(tools, changes, scenario):
    rules = tools.rules(**changes)
    result = simulate(rules, scenario, lambda replay, now: tools.audit(replay))
    must_hold(rules, result)
    if rules.on_short_group == "retry" and scenario.skipped == 0:
        assert result.ledger["trained"] == rules.steps * rules.fresh_groups * rules.group_size


@pytest.mark.parametrize("shards", [1, 2, 4])
@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_without_faults_nothing_but_what_was_under_way_at_the_end_is_lost(tools, shards, data):
    changes, scenario = data.draw(worlds(faults=False, shards=shards))
    changes |= {"lease_timeout": 10_000.0, "zero_variance": "keep"}
    rules = tools.rules(**changes)
    result = simulate(rules, scenario)
    must_hold(rules, result)
    assert result.ledger["trained"] == rules.steps * rules.fresh_groups * rules.group_size
    assert result.ledger["issued"] == result.ledger["trained"] + result.ledger["dropped.stale"]


@settings(max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(worlds(), st.sampled_from([{"newest_first": True}, {"window": ENDLESS, "on_stale": "drop"}]), st.integers(1, 3))
def test_short_answers_that_grow_old_in_a_small_buffer_neither_overflow_it_nor_stop_the_run(tools, world, order, room):
    """A ready group takes a fiftieth of its reservation, so many are ready, and much becomes too old at once."""
    changes, scenario = world
    groups, per_group = changes["groups_per_step"], 10 * GROUP_BYTES
    changes |= {"window": 1, "newest_first": False, "reuse": 1, "max_staleness": 16, "lead": 16, "steps": 40} | order
    rules = tools.rules(**changes | {"capacity_bytes": room * groups * per_group, "group_bytes": per_group})
    result = simulate(rules, scenario, lambda replay, now: tools.audit(replay))
    assert (result.error, result.steps) == ("", 40)
    assert result.max_staleness <= 16
    assert result.max_buffered_bytes <= rules.capacity_bytes + (2 * groups - 1) * per_group


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("order", ["fifo", "windowed", "fresh", "replay"])
def test_hundreds_of_steps_at_random_durations_and_publish_times_stay_within_the_bound(tools, bound, order, shards):
    changes = {
        "fifo": {}, "windowed": {"window": 1 + min(1, bound) * 3}, "fresh": {"newest_first": True},
        "replay": {"reuse": min(3, bound + 1)},
    }[order]  # fmt: skip
    groups = 3 if shards == 1 else 4
    steps = 500 if shards == 1 else 100
    rules = tools.rules(steps=steps, groups_per_step=groups, max_staleness=bound, shards=shards, **changes)
    if rules.fresh_groups % shards:  # refused by the config (async_rl.buffer_config.check_shards)
        rules = rules._replace(groups_per_step=rules.groups_per_step * rules.reuse)
    scenario = Scenario(
        seed=bound, nodes=5, slots=3, lengths=Lognormal(50, 1), slowest=4, push_s=Lognormal(1, 1),
        trainer=TrainerSpeed(Lognormal(2, 1)),
    )  # fmt: skip
    result = simulate(rules, scenario)
    must_hold(rules, result)
    assert max(result.staleness) >= rules.lead + rules.reuse - 1  # the bound is used, not merely kept


@pytest.mark.parametrize("bound", [0, 4])
def test_with_half_the_instances_teaching_nothing_every_batch_has_its_size_and_the_ledger_balances(tools, bound):
    rules = tools.rules(
        steps=50, groups_per_step=4, group_size=4, max_staleness=bound, zero_variance="refill", max_tries=60
    )
    scenario = Scenario(
        nodes=4, slots=4, lengths=Lognormal(30, 1), zero_variance=0.5, trainer=TrainerSpeed(Constant(1))
    )
    sizes = []

    def check(replay, now):
        tools.audit(replay)
        if replay.lent is not None:
            sizes.append(sum(group.good for group in replay.lent))
            assert all(len({held.lowest for held in group.held}) > 1 for group in replay.lent)

    result = simulate(rules, scenario, check)
    must_hold(rules, result)
    assert set(sizes) == {16}
    assert result.ledger["trained"] == 50 * 16
    assert 0.4 < result.ledger["dropped.zero_variance"] / result.ledger["issued"] < 0.6


def test_thousands_of_nodes_that_die_and_come_back_lose_no_group(tools):
    rules = tools.rules(
        steps=6, groups_per_step=1000, group_size=2, max_staleness=4, window=1001, capacity_bytes=6000 * GROUP_BYTES
    )
    scenario = Scenario(
        nodes=2000, slots=2, lengths=Lognormal(50, 0.7), slowest=3, push_s=Lognormal(0.5, 1),
        trainer=TrainerSpeed(Constant(3)), node_life_s=30, undead=0.2, hangs=0.001, env_failed=0.01,
    )  # fmt: skip
    calls = 0

    def check(replay, now):
        nonlocal calls
        calls += 1
        assert replay.groups.ledger.balances
        if calls % 2000 == 0:
            tools.audit(replay)

    result = simulate(rules, scenario, check)
    must_hold(rules, result)
    assert result.ledger["trained"] == 6 * 1000 * 2
    assert result.ledger["dropped.node_lost"] > 100


def test_a_run_whose_nodes_never_deliver_ends_naming_what_the_trainer_waits_for(tools):
    rules = tools.rules(steps=1, groups_per_step=1, group_size=2)
    result = simulate(rules, Scenario(nodes=1, hangs=1.0, draw_timeout_s=500))
    assert result.steps == 0
    assert "stuck after 0 steps: the trainer waits for ticket 0" in result.error
    assert result.ledger["issued"] == result.ledger["dropped.cancelled"] > 2  # leased again after each time-out


def test_a_task_that_always_fails_ends_the_run_naming_ticket_and_reason(tools):
    result = simulate(tools.rules(max_tries=4), Scenario(env_failed=1.0))
    assert "has failed 4 times, which is buffer.max_tries" in result.error
    assert "env_failed" in result.error


def test_the_same_seed_gives_the_same_run(tools):
    scenario = Scenario(seed=3, lengths=Lognormal(50, 1), node_life_s=20, refused=0.1, zero_variance=0.2)
    rules = tools.rules(zero_variance="refill", max_tries=50)
    assert simulate(rules, scenario) == simulate(rules, scenario)
    assert simulate(rules, scenario) != simulate(rules, scenario._replace(seed=4))


def test_groups_that_come_as_bundles_make_the_same_run_as_their_attempts_alone(tools, monkeypatch):
    """Nodes die meanwhile, are thought dead, and answer too late: some bundles are taken apart."""
    rules = tools.rules(steps=30, groups_per_step=4, group_size=4, max_staleness=2, lease_timeout=20.0)
    scenario = Scenario(
        seed=1, nodes=6, slots=8, lengths=Lognormal(100, 1.5), slowest=4, whole_groups=True, node_life_s=15,
        rejoin_s=1, undead=0.5, trainer=TrainerSpeed(Constant(1)),
    )  # fmt: skip
    bundled = simulate(rules, scenario)
    whole, kinds = Outcomes.of, Counter()

    def each_alone(self, node, job):
        came = whole(self, node, job)
        kinds.update(type(each).__name__ for each in came)
        apart = [alone(each, taken_apart) if isinstance(each, BundleArrived) else [each] for each in came]
        return [one for own in apart for one in own]

    monkeypatch.setattr(Outcomes, "of", each_alone)
    assert simulate(rules, scenario) == bundled
    assert kinds["BundleArrived"] > 100
    assert bundled.outside["late"] > 0


def test_more_lead_keeps_the_trainer_less_idle(tools):
    scenario = Scenario(
        nodes=4, slots=4, lengths=Lognormal(100, 0.5), push_s=Constant(1), trainer=TrainerSpeed(Constant(4))
    )
    idle = [
        simulate(tools.rules(steps=60, groups_per_step=4, max_staleness=k), scenario).trainer_idle for k in (0, 1, 4)
    ]
    assert idle[0] > idle[1] > idle[2]


def test_a_larger_window_overtakes_stragglers(tools):
    """Same bound, one sample in fifty takes six times as long, plenty of nodes: the trainer is idle for less than half
    the time. (In the long run it gains nothing: the same bound limits how far a straggler may be overtaken.)"""
    idle = {1: 0.0, 17: 0.0}
    for window, seed in product(idle, range(5)):
        scenario = Scenario(
            seed=seed, nodes=20, slots=4, lengths=Values((50.0,) * 49 + (300.0,)), trainer=TrainerSpeed(Constant(2.0))
        )
        rules = tools.rules(steps=60, groups_per_step=4, max_staleness=8, lease_timeout=1e4, window=window)
        result = simulate(rules, scenario)
        must_hold(rules, result)
        idle[window] += result.trainer_idle
    assert idle[17] < idle[1] / 2


def test_slow_tasks_keep_their_share_in_training(tools):
    """One sample in five takes 20 times as long, over 300 steps. Tickets are drawn in order or within the window,
    never by who is done first, so all that was issued is trained: the shares are equal."""
    rules = tools.rules(steps=300, groups_per_step=4, max_staleness=4, window=5, lease_timeout=1e4)
    result = simulate(
        rules,
        Scenario(nodes=6, slots=4, lengths=Values((50.0,) * 4 + (1000.0,)), trainer=TrainerSpeed(Constant(2))),
    )
    must_hold(rules, result)
    assert result.ledger["trained"] == result.ledger["issued"] == 300 * 4 * 2

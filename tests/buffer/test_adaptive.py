"""The adaptive bound: when it falls and rises, and that it never costs the guarantee or the run."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.adaptive import (
    HEALTHY_STEPS,
    AdaptiveBound,
    Report,
    adaptive_lead,
    is_trouble,
    least_bound,
    next_bound,
)
from buffer.admission import may_lease
from buffer.scenario import Lognormal, Scenario, TrainerSpeed
from buffer.simulate import simulate

WELL, BADLY, NOTHING = Report(0.9, 0.001), Report(0.1, 0.001), Report(None, None)
reports = st.sampled_from([WELL, WELL, WELL, BADLY, Report(0.9, 1.0), Report(math.nan, 0.0), NOTHING])


@pytest.fixture
def after(tools):
    def go(bound: AdaptiveBound, *steps: Report, **changes: object) -> AdaptiveBound:
        rules = tools.rules(**{"max_staleness": 8, **changes})
        for report in steps:
            bound = next_bound(bound, report, rules)
        return bound

    return go


@pytest.mark.parametrize(
    ("report", "trouble"),
    [
        (Report(0.3, 0.05), False), (Report(0.29, 0.0), True), (Report(1.0, 0.051), True), (Report(None, 0.0), False),
        (Report(math.nan, 0.0), True), (Report(1.0, math.inf), True), (Report(1.0, math.nan), True), (NOTHING, False),
    ],
)  # fmt: skip
def test_trouble_is_a_small_sample_or_a_large_divergence_or_a_number_that_is_none(report, trouble):
    assert is_trouble(report, 0.3, 0.05) == trouble


def test_the_bound_falls_at_once_and_is_not_made_to_answer_for_older_data(after):
    fallen = after(AdaptiveBound(8), BADLY)
    assert fallen.bound == 7
    assert after(fallen, *[BADLY] * 9).bound == 7  # what was leased under 8 is still coming
    assert after(fallen, *[BADLY] * 10).bound == 6


def test_with_reuse_older_data_trains_until_it_is_as_old_as_the_guarantee_allows(after):
    """K = 8: what was leased under a bound of 5 trains again for 9 batches, not 6."""
    fallen = after(AdaptiveBound(6), BADLY, reuse=2)
    assert fallen.bound == 5
    assert after(fallen, *[BADLY] * 9, reuse=2).bound == 5
    assert after(fallen, *[BADLY] * 10, reuse=2).bound == 4


def test_the_bound_rises_by_one_for_each_row_of_healthy_steps_and_trouble_begins_it_anew(after):
    low = AdaptiveBound(3)
    assert after(low, *[WELL] * (HEALTHY_STEPS - 1)).bound == 3
    assert after(low, *[WELL] * HEALTHY_STEPS).bound == 4
    assert after(low, *[WELL] * 3 * HEALTHY_STEPS).bound == 6
    settling = AdaptiveBound(3, settling=50)
    assert after(settling, *[WELL] * (HEALTHY_STEPS - 1), BADLY, *[WELL] * (HEALTHY_STEPS - 1)).bound == 3


def test_a_step_that_trained_nothing_says_nothing(after):
    state = AdaptiveBound(3, 4, 5)
    assert after(state, NOTHING) == state


@settings(
    max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 9), st.integers(0, 9), st.lists(reports, max_size=120))
def test_whatever_is_reported_nodes_work_one_version_ahead_or_more_and_the_bound_moves_by_one(tools, most, cost, steps):
    """Whatever window and reuse cost of the lead; where it is 0 by the configuration, it stays so."""
    rules = tools.rules(max_staleness=most, lead=max(0, most - cost))
    state = AdaptiveBound(most)
    falls = rises = 0
    for report in steps:
        before, state = state, next_bound(state, report, rules)
        assert state.bound <= most
        assert min(1, rules.lead) <= adaptive_lead(rules, state.bound) <= rules.lead
        assert abs(state.bound - before.bound) <= 1
        assert 0 <= state.healthy < HEALTHY_STEPS
        falls += state.bound < before.bound
        rises += state.bound > before.bound
        assert not (state.bound < before.bound and not is_trouble(report, 0.3, 0.05))
    assert rises <= len(steps) // HEALTHY_STEPS
    assert state.bound == most - falls + rises


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8), st.integers(0, 9))
def test_the_lead_only_falls_and_the_next_batch_may_always_be_leased(staleness, cost, bound, version):
    """To a node of the trainer's version: that is what keeps anybody from waiting for ever."""

    class Some:
        max_staleness, lead = staleness, max(0, staleness - cost)

    lead = adaptive_lead(Some, max(least_bound(Some), min(bound, staleness)))
    assert 0 <= lead <= Some.lead
    assert adaptive_lead(Some, staleness) == Some.lead
    assert all(may_lease(ticket, version, lead, 4) for ticket in range((version + 1) * 4))


def test_nodes_work_less_far_ahead_after_trouble(tools):
    """B = 1, K = 3: a node of version 0 may have tickets 0 ... 3, and after trouble of version 1 only up to 3."""
    play = tools.play(groups_per_step=1, max_staleness=3, adaptive=True)
    leases = play.node("a", 100)
    assert [lease.ticket for lease in leases] == [0, 1, 2, 3]
    for lease in leases:
        play.deliver(lease)
    play.draw()
    play.confirm(ess=0.1)
    assert play.replay.bound.bound == 2
    assert play.attest("a") == []
    for _ in range(3):
        play.draw()
        play.confirm(ess=0.9)
        for lease in play.attest("a"):
            assert lease.ticket == play.replay.confirmed_batches + 2
            play.deliver(lease)


@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([{}, {"window": 3}, {"newest_first": True}, {"reuse": 2}]), st.integers(0, 2**32),
    st.sampled_from([0.02, 0.3, 1.0]), st.integers(2, 5),
)  # fmt: skip
def test_under_a_virtual_clock_no_trouble_breaks_the_bound_or_stops_a_run(tools, order, seed, troubled, bound):
    rules = tools.rules(
        steps=30, groups_per_step=2, max_staleness=bound, adaptive=True, max_tries=100, lease_timeout=40.0, **order
    )
    scenario = Scenario(
        seed=seed, nodes=3, slots=4, lengths=Lognormal(30, 1), push_s=Lognormal(1, 1), troubled=troubled,
        trainer=TrainerSpeed(Lognormal(1, 0.5)), node_life_s=60, hangs=0.01,
    )  # fmt: skip
    result = simulate(rules, scenario, lambda replay, now: tools.audit(replay))
    assert (result.error, result.steps) == ("", 30)
    assert result.max_staleness <= bound


def test_a_run_in_trouble_trains_on_younger_data(tools):
    rules = tools.rules(steps=200, groups_per_step=2, max_staleness=6, adaptive=True)
    scenario = Scenario(nodes=8, slots=8, lengths=Lognormal(30, 0.5), trainer=TrainerSpeed(Lognormal(2, 0.3)))
    calm, troubled = (simulate(rules, scenario._replace(troubled=share)) for share in (0.01, 1.0))
    assert troubled.mean_staleness < calm.mean_staleness / 2
    assert calm.max_staleness <= 6

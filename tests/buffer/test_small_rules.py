"""Admission, capacity, ledger, leases and the numbers from the configuration, each on its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import Config, group_bytes
from buffer.admission import TicketQueue, least_version, may_lease
from buffer.capacity import Credit, fits
from buffer.leases import Leases, eval_seed, train_instance, train_seed
from buffer.ledger import EVALUATION, TRAINING, Ledger, LedgerError
from buffer.rules import rules_from_config

# --- admission -------------------------------------------------------------------------------------------------------


def test_bound_zero_admits_exactly_the_tickets_of_the_next_batch():
    assert [ticket for ticket in range(20) if may_lease(ticket, 2, 0, 4)] == list(range(12))


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 10), st.integers(1, 64))
def test_a_ticket_admitted_at_a_version_is_within_the_lead_of_its_own_batch(ticket, version, lead, groups):
    assert may_lease(ticket, version, lead, groups) == (ticket // groups - version <= lead)
    assert may_lease(ticket, version, lead, groups) == (version >= least_version(ticket, lead, groups))


def test_tickets_opened_again_come_before_new_ones_lowest_first():
    queue = TicketQueue(5)
    assert [queue.take() for _ in range(3)] == [0, 1, 2]
    for ticket in (2, 0, 2):
        queue.reopen(ticket)
    assert [queue.take() for _ in range(4)] == [0, 2, 3, 4]
    assert queue.lowest() is None


# --- capacity --------------------------------------------------------------------------------------------------------


def test_credit_counts_reservations_and_ready_bytes_against_one_capacity():
    credit = Credit(capacity_bytes=250, group_bytes=100)
    credit.reserve()
    credit.reserve()
    assert not credit.admits(trainer_needs_it=False)
    assert credit.admits(trainer_needs_it=True)
    credit.became_ready(50)
    assert (credit.reserved_bytes, credit.ready_bytes) == (100, 50)
    assert credit.admits(trainer_needs_it=False)
    credit.drawn(50)
    assert fits(credit.reserved_bytes, credit.ready_bytes, 150, 250)


# --- ledger ----------------------------------------------------------------------------------------------------------


def test_trained_is_for_good():
    ledger = Ledger(TRAINING)
    ledger.issue((1, 0))
    for start, end in (("leased", "ready"), ("ready", "batched"), ("batched", "trained")):
        ledger.move((1, 0), start, end)
    for start, end in (("trained", "dropped.stale"), ("batched", "trained"), ("leased", "ready")):
        with pytest.raises(LedgerError, match="closed or unknown"):
            ledger.move((1, 0), start, end)
    assert ledger.counts()["trained"] == 1


@pytest.mark.parametrize(("start", "end"), [("leased", "batched"), ("leased", "trained"), ("leased", "evaluated")])
def test_a_move_that_the_rules_do_not_know_is_refused_and_changes_nothing(start, end):
    ledger = Ledger(TRAINING)
    ledger.issue((1, 0))
    before = ledger.counts()
    with pytest.raises(LedgerError, match=r"attempt \(1, 0\), leased, cannot move"):
        ledger.move((1, 0), start, end)
    assert ledger.counts() == before


def test_an_attempt_is_issued_once():
    ledger = Ledger(EVALUATION)
    ledger.issue((1, 0))
    with pytest.raises(LedgerError, match="twice"):
        ledger.issue((1, 0))


@given(st.lists(st.integers(0, 30), max_size=200), st.randoms(use_true_random=False))
def test_the_ledger_balances_after_any_walk(walk, rng):
    ledger = Ledger(TRAINING)
    places: dict[tuple[int, int], str] = {}
    for lease, step in enumerate(walk):
        if step < 10 or not places:
            ledger.issue((lease, 0))
            places[lease, 0] = "leased"
        else:
            attempt = rng.choice(sorted(places))
            end = rng.choice(TRAINING[places[attempt]])
            ledger.move(attempt, places.pop(attempt), end)
            if end in TRAINING:
                places[attempt] = end
        assert ledger.balances
        counts = ledger.counts()
        assert all(counts[place] == list(places.values()).count(place) for place in TRAINING)


def test_what_was_open_at_a_checkpoint_is_cancelled_when_it_is_resumed():
    ledger = Ledger(TRAINING)
    ledger.resume({"issued": 9, "leased": 1, "ready": 2, "batched": 1, "trained": 4, "dropped.stale": 1})
    counts = ledger.counts()
    assert ledger.balances
    assert (counts["issued"], counts["trained"], counts["dropped.cancelled"], counts["dropped.stale"]) == (9, 4, 4, 1)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_instances_and_seeds_are_63_bits_the_same_everywhere_and_differ_in_every_part():
    assert train_instance(1, 2, 3) == 4456857213367275050
    parts = [(1, 2, 3, 4, 0), (2, 2, 3, 4, 0), (1, 3, 3, 4, 0), (1, 2, 4, 4, 0), (1, 2, 3, 5, 0), (1, 2, 3, 4, 1)]
    seeds = [train_seed(*part) for part in parts] + [train_instance(1, 2, 3), eval_seed(1, 2, 3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_lease_expires_at_its_deadline_unless_it_is_closed():
    leases = Leases(timeout=10)
    first = leases.grant("a", 0, 0, (0, 1), 0, now=0.0)
    second = leases.grant("a", 1, 0, (0,), 0, now=1.0)
    leases.grant("a", 2, 0, (0,), 0, now=2.0)
    assert leases.close_sample(second, 0)
    assert leases.expired(9.9) == []
    assert leases.expired(11.5) == [first]
    assert leases.expired(11.5) == []
    assert leases.was_issued(2)
    assert not leases.was_issued(3)


# --- configuration ---------------------------------------------------------------------------------------------------


def test_rules_come_from_the_configuration_with_a_lead_that_pays_for_the_window():
    config = Config()
    rules = rules_from_config(config)
    assert (rules.window, rules.lead, rules.group_bytes) == (1, config.buffer.max_staleness, group_bytes(config))
    windowed = Config(
        buffer=type(config.buffer)(order="windowed", window=34, groups_per_step=32, max_staleness=4),
    )
    assert rules_from_config(windowed).lead == 2
    assert rules_from_config(windowed).window == 34

"""Admission, capacity, ledger, leases and the numbers from the configuration, each on its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import Config, group_bytes
from buffer.admission import TicketQueue, least_version, may_lease
from buffer.capacity import Credit, fits
from buffer.leases import Leases, eval_seed, train_instance, train_seeds
from buffer.ledger import EVALUATION, TRAINING, Account, Ledger, LedgerError, mask_of, members
from buffer.nodes import Nodes
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
    assert not credit.admits_one_more
    credit.became_ready(50)
    assert (credit.reserved_bytes, credit.ready_bytes) == (100, 50)
    assert credit.admits_one_more
    credit.drawn(50, keep=False)
    assert fits(credit.held_bytes, 150, 250)


def test_what_may_be_used_again_counts_until_it_is_released():
    credit = Credit(capacity_bytes=150, group_bytes=100)
    credit.reserve()
    credit.became_ready(60)
    credit.drawn(60, keep=True)
    assert (credit.ready_bytes, credit.kept_bytes, credit.held_bytes) == (0, 60, 60)
    assert not credit.admits_one_more
    credit.released(60)
    assert credit.held_bytes == 0
    assert credit.admits_one_more


# --- ledger ----------------------------------------------------------------------------------------------------------


def account(ledger: Ledger, lease: int, *samples: int) -> Account:
    made = Account(lease)
    ledger.issue(made, mask_of(samples))
    return made


@given(st.sets(st.integers(0, 200)))
def test_a_mask_is_its_samples_in_order(samples):
    assert members(mask_of(samples)) == tuple(sorted(samples))


def test_trained_is_for_good():
    ledger = Ledger(TRAINING)
    attempt = account(ledger, 1, 0)
    for start, end in (("leased", "ready"), ("ready", "batched"), ("batched", "trained")):
        ledger.move(attempt, 1, start, end)
    for start, end in (("trained", "dropped.stale"), ("batched", "trained"), ("leased", "ready")):
        with pytest.raises(LedgerError, match="closed or unknown"):
            ledger.move(attempt, 1, start, end)
    assert ledger.counts()["trained"] == 1


@pytest.mark.parametrize(("start", "end"), [("leased", "batched"), ("leased", "trained"), ("leased", "evaluated")])
def test_a_move_that_the_rules_do_not_know_is_refused_and_changes_nothing(start, end):
    ledger = Ledger(TRAINING)
    attempt = account(ledger, 1, 0)
    before = ledger.counts()
    with pytest.raises(LedgerError, match=r"attempts 1/\(0,\) cannot move"):
        ledger.move(attempt, 1, start, end)
    assert ledger.counts() == before
    assert attempt.leased == 1


def test_a_move_of_several_attempts_is_refused_whole_when_one_is_elsewhere():
    ledger = Ledger(TRAINING)
    group = account(ledger, 1, 0, 1, 2)
    ledger.move(group, mask_of([1]), "leased", "ready")
    before = ledger.counts()
    with pytest.raises(LedgerError, match=r"attempts 1/\(0, 1\) cannot move from leased to ready"):
        ledger.move(group, mask_of([0, 1]), "leased", "ready")
    assert ledger.counts() == before
    ledger.move(group, mask_of([0, 2]), "leased", "ready")
    assert (ledger.counts()["ready"], group.ready, group.leased) == (3, 0b111, 0)


def test_an_attempt_is_issued_once():
    ledger = Ledger(EVALUATION)
    attempt = account(ledger, 1, 0)
    with pytest.raises(LedgerError, match="twice"):
        ledger.issue(attempt, 1)


@given(st.lists(st.integers(0, 30), max_size=200), st.randoms(use_true_random=False))
def test_the_ledger_balances_after_any_walk(walk, rng):
    ledger = Ledger(TRAINING)
    accounts: dict[int, Account] = {}
    places: dict[tuple[int, int], str] = {}
    for lease, step in enumerate(walk):
        if step < 10 or not places:
            accounts[lease] = account(ledger, lease, 0, 2)
            places |= {(lease, 0): "leased", (lease, 2): "leased"}
        else:
            lease, sample = rng.choice(sorted(places))
            start = places.pop((lease, sample))
            end = rng.choice(TRAINING[start])
            ledger.move(accounts[lease], mask_of([sample]), start, end)
            if end in TRAINING:
                places[lease, sample] = end
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
    parts = ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))
    seeds = [seed for part in parts for seed in train_seeds(*part, range(20), {})]
    seeds += [train_seeds(1, 2, 3, (4,), {4: retry})[0] for retry in (1, 2)]
    evals = ((1, "a", 2, 0, 3), (1, "b", 2, 0, 3), (1, "a", 2, 1, 3))
    seeds += [train_instance(1, 2, 3), *(eval_seed(*part) for part in evals)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.sets(st.integers(0, 30), min_size=1), st.dictionaries(st.integers(0, 30), st.integers(1, 3)))
def test_a_samples_seed_does_not_depend_on_which_others_are_leased_with_it(samples, retries):
    wanted = sorted(samples)
    alone = [train_seeds(7, 5, 1, (sample,), retries)[0] for sample in wanted]
    assert list(train_seeds(7, 5, 1, wanted, retries)) == alone


def test_a_lease_expires_at_its_deadline_unless_it_is_closed():
    leases, node = Leases(timeout=10), Nodes().joined("a", 8)
    first = leases.grant(node, 0, 0, now=0.0)
    second = leases.grant(node, 1, 0, now=1.0)
    leases.grant(node, 2, 0, now=2.0)
    leases.close(second)
    assert leases.expired(9.9) == []
    assert leases.expired(11.5) == [first]
    assert leases.expired(11.5) == []
    assert leases.find(0) is first
    assert leases.find(1) is None
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
    assert rules.nodes == 0  # started by hand: there may be more
    assert rules_from_config(config, together=True).nodes == config.inference.nodes

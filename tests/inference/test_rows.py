"""Keeping the batch compact and sorted by policy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference.rows import DEAD, plan_rows, policy_ranges


def ints(values):
    return np.array(values, dtype=np.int64)


@given(st.lists(st.integers(DEAD, 3), max_size=20), st.lists(st.integers(0, 4), max_size=10))
def test_every_request_keeps_its_place_in_a_compact_batch_of_contiguous_policies(current, new):
    plan = plan_rows(ints(current), ints(new))
    # Rows carry (policy, identity); new requests have identities of their own.
    rows = [(policy, i) for i, policy in enumerate(current)] + [None] * len(new)
    for target, row in zip(plan.target.tolist(), [rows[i] for i in plan.source.tolist()], strict=True):
        rows[target] = row
    for j, row in enumerate(plan.placed.tolist()):
        rows[row] = (new[j], 100 + j)
    alive = [(policy, i) for i, policy in enumerate(current) if policy != DEAD]
    assert plan.n == len(alive) + len(new)
    assert sorted(rows[: plan.n]) == sorted(alive + [(policy, 100 + j) for j, policy in enumerate(new)])
    policies = [policy for policy, _ in rows[: plan.n]]
    assert len(list(policy_ranges(ints(policies)))) == len(set(policies))


@given(st.lists(st.sampled_from([DEAD, 7]), max_size=30))
def test_one_policy_moves_no_more_rows_than_there_are_holes_below_the_new_end(current):
    plan = plan_rows(ints(current), ints([]))
    assert len(plan.source) == sum(policy == DEAD for policy in current[: plan.n])


def test_new_requests_take_the_places_of_ended_ones():
    plan = plan_rows(ints([7, DEAD, 7, DEAD]), ints([7, 7]))
    assert plan.source.tolist() == []
    assert plan.placed.tolist() == [1, 3]


def test_policy_ranges_of_nothing_and_of_several():
    assert list(policy_ranges(ints([]))) == []
    assert list(policy_ranges(ints([2, 2, 5, 2]))) == [(2, 0, 2), (5, 2, 3), (2, 3, 4)]

"""The order of instances: epochs without replacement, mixed by weight, a pure function of seed and ticket."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.order import Source, asked, asked_instead, block_of, first_of, permuted, place_of, shares, turn

SEEDS = st.integers(0, 2**62)
SOURCES = st.lists(
    st.builds(Source, st.integers(1, 60), st.integers(1, 9), st.sampled_from([0, 0, 1, 4, 7, 100])),
    min_size=1, max_size=4,
).map(tuple)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 150), key=st.text(max_size=8))
def test_a_permutation_takes_every_place_to_another(size, key):
    assert sorted(permuted(key, size, place) for place in range(size)) == list(range(size))


def test_a_place_goes_everywhere_equally_often():
    """Over keys, of each place of 6: chi-square with 5 degrees of freedom, whose 0.9999 quantile is 25.7."""
    keys, size = 3000, 6
    for place in range(size):
        seen = Counter(permuted(f"{key}", size, place) for key in range(keys))
        assert sum((seen[each] - keys / size) ** 2 / (keys / size) for each in range(size)) < 25.7


@settings(deadline=None, max_examples=100)
@given(st.lists(st.decimals("0.001", 1000, places=3).map(float), min_size=1, max_size=5))
def test_shares_are_in_the_proportion_of_the_weights_as_written(weights):
    whole = shares(weights)
    assert min(whole) >= 1
    for weight, share in zip(weights, whole, strict=True):
        assert Fraction(share, whole[0]) == Fraction(str(weight)) / Fraction(str(weights[0]))


@settings(deadline=None, max_examples=60)
@given(share_of=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_turns_are_taken_one_after_the_other_and_as_evenly_as_can_be(share_of):
    total = sum(share_of)
    taken = [0] * len(share_of)
    for ticket in range(2 * total + 5):
        source, k = turn(share_of, ticket)
        assert k == taken[source]
        taken[source] += 1
        for had, share in zip(taken, share_of, strict=True):
            due = Fraction((ticket + 1) * share, total)
            assert abs(had - due) <= Fraction(1, 2) + Fraction(share * len(share_of), 2 * total)
        if (ticket + 1) % total == 0:
            assert [had * total for had in taken] == [share * (ticket + 1) for share in share_of]


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, sources=SOURCES, stop=st.integers(0, 200))
def test_stopped_anywhere_an_epoch_has_the_same_instances_left_none_twice_and_none_lost(seed, sources, stop):
    """Of each source, whatever its weight: what was asked before the stop and what is asked after it are its rows, each
    once in every epoch that is whole."""
    tickets = max(source.size * -(-sum(each.share for each in sources) // source.share) for source in sources)
    tickets = min(2 * tickets, 900)
    before = [asked(seed, sources, ticket) for ticket in range(min(stop, tickets))]
    after = [asked(seed, sources, ticket) for ticket in range(min(stop, tickets), tickets)]
    rows: list[list[int]] = [[] for _ in sources]
    for instance in before + after:
        source, row = place_of(sources, instance)
        assert 0 <= row < sources[source].size
        assert first_of(sources, source) + row == instance
        rows[source].append(row)
    for source, asked_rows in zip(sources, rows, strict=True):
        for start in range(0, len(asked_rows), source.size):
            epoch = asked_rows[start : start + source.size]
            assert len(set(epoch)) == len(epoch)
            if len(epoch) == source.size:
                assert sorted(epoch) == list(range(source.size))
            if source.block:  # read forward: no block before the one in front of it was asked
                assert [row // source.block for row in epoch] == sorted(row // source.block for row in epoch)


def test_without_weights_all_instances_of_all_sources_make_one_epoch():
    sizes = [3, 40, 11]
    sources = tuple(Source(size, share, 0) for size, share in zip(sizes, shares(sizes), strict=True))
    for epoch in range(3):
        tickets = range(epoch * sum(sizes), (epoch + 1) * sum(sizes))
        assert sorted(asked(5, sources, ticket) for ticket in tickets) == list(range(sum(sizes)))


@pytest.mark.parametrize("source", [Source(200, 1, 0), Source(200, 1, 50)])
def test_every_epoch_and_every_seed_has_an_order_of_its_own(source):
    def order(seed, epoch):
        return [asked(seed, (source,), epoch * source.size + n) for n in range(source.size)]

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for n, one in enumerate(orders) for other in [*orders[:n], list(range(200))])


@settings(deadline=None, max_examples=100)
@given(seed=SEEDS, sources=SOURCES, ticket=st.integers(0, 10**12), word=st.integers(0, 2**63 - 1))
def test_what_a_later_try_asks_is_of_the_same_source_and_block(seed, sources, ticket, word):
    first = place_of(sources, asked(seed, sources, ticket))
    other = place_of(sources, asked_instead(seed, sources, ticket, word))
    assert first.source == other.source
    source = sources[first.source]
    assert block_of(source, first.row) == block_of(source, other.row)
    assert 0 <= other.row < source.size


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    """Written down once: runs that are resumed count on it."""
    sources = (Source(1000, 2, 0), Source(100_000, 3, 500))
    assert [asked(7, sources, ticket) for ticket in (0, 1, 2, 3, 4, 999, 123_456)] == [
        1274, 436, 1416, 588, 1074, 1911, 328
    ]  # fmt: skip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.balance import attention_share, balance, imbalance

rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=40)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 200), st.sampled_from([0.0, 0.01, 1.0]))


@given(rows, sizes)
def test_every_row_is_on_one_rank_within_the_budget_with_its_attempt(
    rows: list[tuple[int, int]], sizes: tuple[int, int, float]
) -> None:
    ranks, budget, quadratic = sizes
    lengths, attempts = [length for length, _ in rows], [attempt for _, attempt in rows]
    shares = balance(lengths, attempts, ranks, budget, quadratic).shares
    assert len(shares) == ranks
    micro_batches = [micro_batch for share in shares for micro_batch in share]
    assert sorted(row for micro_batch in micro_batches for row in micro_batch) == list(range(len(rows)))
    homes = {(attempts[row], place) for place, members in enumerate(micro_batches) for row in members}
    assert len(homes) == len(set(attempts))
    for members in micro_batches:
        alone = len({attempts[row] for row in members}) <= 1
        assert alone or sum(lengths[row] for row in members) <= budget


@given(rows, sizes)
def test_ranks_have_equally_many_micro_batches_and_costs_that_differ_by_one_attempt_at_most(
    rows: list[tuple[int, int]], sizes: tuple[int, int, float]
) -> None:
    ranks, budget, quadratic = sizes
    lengths, attempts = [length for length, _ in rows], [attempt for _, attempt in rows]
    shares, costs = balance(lengths, attempts, ranks, budget, quadratic)
    assert len({len(share) for share in shares}) == 1

    def cost(members: list[int]) -> float:
        return sum(lengths[row] + quadratic * lengths[row] ** 2 for row in members)

    of_ranks = [cost([row for members in share for row in members]) for share in shares]
    of_attempts = [
        cost([row for row in range(len(rows)) if attempts[row] == attempt]) for attempt in dict.fromkeys(attempts)
    ]
    assert max(of_ranks) - min(of_ranks) <= max(of_attempts, default=0) * (1 + 1e-9)
    assert costs == pytest.approx(of_ranks)
    assert imbalance(costs) == pytest.approx(max(of_ranks) * ranks / sum(of_ranks) if rows else 1.0)
    for share in shares:  # what is computed at the same time is alike
        assert [cost(members) for members in share] == sorted((cost(members) for members in share), reverse=True)


@given(rows, sizes)
def test_the_same_rows_are_dealt_the_same_way(rows: list[tuple[int, int]], sizes: tuple[int, int, float]) -> None:
    arguments = ([length for length, _ in rows], [attempt for _, attempt in rows], *sizes)
    assert balance(*arguments) == balance(*arguments)


def test_nothing_to_compute_is_no_micro_batch_for_anybody() -> None:
    assert balance([], [], 3, 100) == ([[], [], []], [0, 0, 0])


def test_fewer_attempts_than_ranks_leave_empty_micro_batches() -> None:
    shares, costs = balance([5, 7], [0, 1], 4, 100)
    assert sorted(shares) == [[[]], [[]], [[0]], [[1]]]
    assert imbalance(costs) == pytest.approx(7 * 4 / 12)


def test_no_rank_is_idle_where_one_micro_batch_would_hold_everything() -> None:
    shares, costs = balance([10] * 8, range(8), 4, 10_000)
    assert [len(members) for share in shares for members in share] == [2, 2, 2, 2]
    assert imbalance(costs) == 1.0


def test_a_rank_with_fewer_micro_batches_cuts_what_it_has_before_it_computes_empty_ones() -> None:
    shares, _ = balance([100, 30, 30, 40], [0, 1, 2, 3], 2, 60)
    assert shares == [[[0], []], [[1, 2], [3]]] or shares == [[[1, 2], [3]], [[0], []]]
    shares, _ = balance([60, 40, 50, 50], [0, 1, 2, 3], 2, 100)
    assert [[len(members) for members in share] for share in shares] == [[2], [2]]


def test_long_sequences_weigh_more_than_their_tokens() -> None:
    """Half of all tokens in one sequence is more than half of the work, so its rank gets less beside it."""
    shares, _ = balance([1000, *[100] * 10], range(11), 2, 10_000, quadratic=1e-3)
    long = next(members for share in shares for members in share if 0 in members)
    assert len(long) == 1
    shares, _ = balance([1000, *[100] * 12], range(13), 2, 10_000)
    long = next(members for share in shares for members in share if 0 in members)
    assert len(long) == 2


def test_a_large_batch_is_even_to_a_thousandth() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 512).astype(int).clip(1, 8192).tolist()
    assert imbalance(balance(lengths, range(512), 8, 16384, attention_share(4096, 200_000_000)).costs) < 1.001

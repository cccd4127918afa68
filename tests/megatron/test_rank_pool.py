from __future__ import annotations

import pytest
from rank_pool import RankFailed, run_ranks


def test_results_come_by_rank_from_processes_that_have_imported_megatron() -> None:
    expected = [{"rank": rank, "total": 23.0, "megatron": True} for rank in (0, 1)]
    assert run_ranks(2, "pool_targets:sum_of_ranks", 11) == expected


def test_an_error_names_its_rank_and_has_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1:.*pool_targets.*ValueError: as it was told"):
        run_ranks(2, "pool_targets:fail", 1)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1: died without a word"):
        run_ranks(2, "pool_targets:die", 1)


def test_a_rank_that_hangs_is_ended_with_the_others() -> None:
    with pytest.raises(RankFailed, match="rank 1: no result after 20 s"):
        run_ranks(2, "pool_targets:sleep", 1, timeout=20)

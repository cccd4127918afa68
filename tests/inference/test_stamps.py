"""Stamps: a policy keeps its number as long as a token under way may carry it, and the table does not grow."""

from __future__ import annotations

import numpy as np

from async_rl.version import PolicyId, VersionRun
from inference.rows import ROW_DTYPE
from inference.seats import Seats
from inference.stamps import Stamps


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"d{version}")


def test_only_what_is_used_is_kept_and_no_number_is_given_twice() -> None:
    stamps = Stamps()
    for version in range(1000):
        assert stamps.serial(policy(version)) == version
        stamps.forget_all_but({0, version - 1, version})
    assert len(stamps._policies) == len(stamps._serials) == 3
    assert stamps.serial(policy(999)) == 999  # known
    assert stamps.serial(policy(1)) == 1000  # forgotten, and new
    runs = stamps.runs(np.array([0, 998, 999, 999], dtype=np.int64))
    assert runs == (VersionRun(0, "d0", 1), VersionRun(998, "d998", 1), VersionRun(999, "d999", 2))


def test_numbers_in_use_are_those_of_rows_and_of_every_token_under_way() -> None:
    seats = Seats(3, 8)
    seats._stamps[1, :4] = [7, 7, 9, 11]
    seats._stamps[2, :3] = [20, 21, 22]
    rows = np.zeros(2, dtype=ROW_DTYPE)
    rows["seat"], rows["alive"], rows["produced"] = [1, 2], [1, 0], [3, 3]
    rows["policy"], rows["prompt_policy"] = [9, 22], [7, 5]
    assert seats.numbers(rows) == {5, 7, 9, 22}  # not 11: written earlier; nor 20 and 21: that answer has ended
    assert seats.numbers(rows[:0]) == set()

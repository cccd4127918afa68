"""Stamps: a policy keeps its number as long as a token in flight may carry it, and the table does not grow."""

from __future__ import annotations

import numpy as np

from async_rl.version import PolicyId, VersionRun
from inference.stamps import KEPT, Stamps


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"d{version}")


def test_the_table_keeps_the_newest_and_no_number_is_given_twice() -> None:
    stamps = Stamps()
    serials = [stamps.serial(policy(version)) for version in range(3 * KEPT)]
    assert serials == list(range(3 * KEPT))
    assert len(stamps._policies) == len(stamps._serials) == KEPT
    assert stamps.serial(policy(3 * KEPT - 1)) == 3 * KEPT - 1  # known
    assert stamps.serial(policy(0)) == 3 * KEPT  # forgotten, and new
    newest = np.array([3 * KEPT - 2, 3 * KEPT - 1, 3 * KEPT - 1], dtype=np.int64)
    runs = stamps.runs(newest)
    assert runs == (
        VersionRun(3 * KEPT - 2, f"d{3 * KEPT - 2}", 1),
        VersionRun(3 * KEPT - 1, f"d{3 * KEPT - 1}", 2),
    )

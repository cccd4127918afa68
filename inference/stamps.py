"""Stamps: a small number for each policy that ever sampled a token here, or one of a prefix that came from elsewhere.

A stamp is written with every token, so it must be cheap: serial numbers in an array, turned into version runs once, at
the end. A policy keeps its number when it is evicted and installed again; so equal policies side by side are one run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.version import PolicyId, VersionRun
from inference.rows import IntArray, policy_ranges


class Stamps:
    def __init__(self) -> None:
        self._policies: list[PolicyId] = []  # by serial number
        self._serials: dict[tuple[int, str], int] = {}

    def serial(self, policy: PolicyId) -> int:
        """The policy's number; a new one the first time."""
        serial = self._serials.setdefault((policy.version, policy.digest), len(self._policies))
        if serial == len(self._policies):
            self._policies.append(policy)
        return serial

    def policy(self, serial: int) -> PolicyId:
        return self._policies[serial]

    def of_runs(self, runs: Sequence[VersionRun]) -> IntArray:
        """One stamp for each token that these runs are over: int64[sum(count)]."""
        serials = [self.serial(PolicyId("main", run.version, run.digest)) for run in runs]
        return np.repeat(np.array(serials, dtype=np.int64), [run.count for run in runs])

    def runs(self, stamps: IntArray) -> tuple[VersionRun, ...]:
        """The reverse."""
        return tuple(
            VersionRun(self._policies[serial].version, self._policies[serial].digest, end - start)
            for serial, start, end in policy_ranges(stamps)
        )

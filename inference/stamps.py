"""Stamps: a small number for each policy of which a token is under way here, sampled here or part of a prefix.

A stamp is written with every token, so it must be cheap: serial numbers in an array, turned into version runs once, at
the end. A policy keeps its number when it is evicted and installed again; so equal policies side by side are one run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from async_rl.version import PolicyId, VersionRun
from inference.rows import IntArray, policy_ranges


class Stamps:
    def __init__(self) -> None:
        self._policies: dict[int, PolicyId] = {}  # by serial number
        self._serials: dict[tuple[int, str], int] = {}
        self._given = 0

    def serial(self, policy: PolicyId) -> int:
        """The policy's number; a new one the first time, and when it was forgotten."""
        key = (policy.version, policy.digest)
        serial = self._serials.get(key)
        if serial is None:
            serial = self._serials[key] = self._given
            self._policies[serial] = policy
            self._given += 1
        return serial

    def forget_all_but(self, used: Collection[int]) -> None:
        """Nothing under way carries another number than these; none is given twice."""
        for serial in self._policies.keys() - used:
            policy = self._policies.pop(serial)
            del self._serials[policy.version, policy.digest]

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

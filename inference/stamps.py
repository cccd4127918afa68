"""Stamps: a small number for each policy that lately sampled a token here, or one of a prefix that came from elsewhere.

A stamp is written with every token, so it must be cheap: serial numbers in an array, turned into version runs once, at
the end. A policy keeps its number when it is evicted and installed again; so equal policies side by side are one run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.version import PolicyId, VersionRun
from inference.rows import IntArray, policy_ranges

KEPT = 1024  # policies whose number is remembered: no token in flight was sampled that many flips ago


class Stamps:
    def __init__(self) -> None:
        self._policies: dict[int, PolicyId] = {}  # by serial number
        self._serials: dict[tuple[int, str], int] = {}
        self._given = 0

    def serial(self, policy: PolicyId) -> int:
        """The policy's number; a new one the first time, and after a long time."""
        key = (policy.version, policy.digest)
        serial = self._serials.get(key)
        if serial is None:
            serial = self._serials[key] = self._given
            self._policies[serial] = policy
            self._given += 1
            if len(self._policies) > KEPT:
                oldest = self._policies.pop(self._given - 1 - KEPT)
                del self._serials[oldest.version, oldest.digest]
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

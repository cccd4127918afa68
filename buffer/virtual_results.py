"""What comes of a simulated sample: results as the buffer's service would read them off the wire, good and bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import msgspec

from async_rl.trajectory import BYTES_PER_TOKEN
from async_rl.version import VersionRun
from buffer.events import ResultArrived
from buffer.rules import Rules
from buffer.scenario import Scenario
from buffer.virtual_node import Job

INSTANCES = 1_000_003  # a prime: an instance's remainder (its number, where the task has so few) decides on its rewards


class Payload(msgspec.Struct, gc=False):
    """What stands for an encoded trajectory: enough for the trainer to see which attempt it is and how old its tokens
    are; nothing of this is taken from the buffer's own records. The rules never look into a payload, they only ask how
    long it is, so ten thousand groups of them need not take their bytes."""

    lease: int
    sample: int
    versions: tuple[VersionRun, ...]
    size: int

    def __len__(self) -> int:
        return self.size


Fate = tuple[Literal["ok", "env_failed", "aborted"], str]
"""Status of an attempt, and what is wrong with its trajectory."""


class Outcomes:
    """`chance` yields uniform numbers in [0, 1)."""

    def __init__(self, rules: Rules, scenario: Scenario, chance: Iterator[float]) -> None:
        self._scenario = scenario
        self._chance = chance
        self._instances = rules.instances or INSTANCES
        self._largest_payload = int(rules.group_bytes / rules.group_size)
        faults = scenario.refused or scenario.env_failed or scenario.aborted
        self._always: Fate | None = None if faults else ("ok", "")

    def of(self, node: str, job: Job) -> list[ResultArrived]:
        """One result for each sample of a job that has ended."""
        scenario, lease = self._scenario, job.lease.lease
        # Decided by the instance alone, since all samples of a group must agree on it.
        equal = job.lease.instance % self._instances < scenario.zero_variance * self._instances
        size = int((scenario.prompt_tokens + job.tokens) * BYTES_PER_TOKEN + scenario.overhead_bytes)
        size = min(size, self._largest_payload)
        results = []
        for sample in job.samples:
            status, problem = self._always or self._fate()
            reward = 1.0 if equal else float(sample)
            versions = job.versions if status == "ok" else ()
            payload = cast(memoryview, Payload(lease, sample, versions, size))
            results.append(ResultArrived(node, lease, sample, status, reward, versions, job.tokens, payload, problem))
        return results

    def _fate(self) -> Fate:
        scenario, draw = self._scenario, next(self._chance)
        if draw < scenario.env_failed:
            return "env_failed", ""
        if draw < scenario.env_failed + scenario.aborted:
            return "aborted", ""
        return "ok", "simulated" if next(self._chance) < scenario.refused else ""

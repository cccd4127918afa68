"""What comes of a simulated sample: results as the buffer's service would read them off the wire, good and bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import msgspec

from async_rl.trajectory import BYTES_PER_TOKEN, EncodedTrajectory
from async_rl.version import VersionRun
from buffer.events import BundleArrived, ResultArrived
from buffer.replay import Replay
from buffer.rules import Rules
from buffer.scenario import Scenario
from buffer.virtual_node import Job

INSTANCES = 1_000_003  # a prime: an instance's remainder (its number, where the task has so few) decides on its rewards


class Payload(msgspec.Struct, gc=False):
    """What stands for an encoded trajectory, or for a bundle of those that are alike: enough for the trainer to see
    which attempts these are and how old the tokens of each are; nothing of this is taken from the buffer's own records.
    The rules only ask how long a payload is, and have a bundle taken apart (VirtualReplay), so ten thousand groups of
    them need not take their bytes."""

    lease: int
    samples: tuple[int, ...]
    versions: tuple[VersionRun, ...]
    size: int

    def __len__(self) -> int:
        return self.size

    @property
    def tokens(self) -> int:
        """Those that were sampled, of all attempts."""
        return len(self.samples) * sum([run.count for run in self.versions])


def attempts_of(payload: EncodedTrajectory | Payload) -> int:
    return len(cast(Payload, payload).samples)


def taken_apart(payload: EncodedTrajectory) -> list[EncodedTrajectory]:
    """As async_rl.bundle does it with encoded ones."""
    bundle = cast(Payload, payload)
    size = bundle.size // len(bundle.samples)
    return [cast(memoryview, Payload(bundle.lease, (sample,), bundle.versions, size)) for sample in bundle.samples]


class VirtualReplay(Replay):
    """The rules, to which such payloads come."""

    taken_apart = staticmethod(taken_apart)


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

    def of(self, node: str, job: Job) -> list[ResultArrived | BundleArrived]:
        """What comes of a job that has ended: a bundle where all of its samples are good and of one policy, else a
        result for each. (A node would bundle the good ones among others, too; the rules do the same with both.)"""
        scenario, lease = self._scenario, job.lease.lease
        # Decided by the instance alone, since all samples of a group must agree on it.
        equal = job.lease.instance % self._instances < scenario.zero_variance * self._instances
        size = int((scenario.prompt_tokens + job.tokens) * BYTES_PER_TOKEN + scenario.overhead_bytes)
        size = min(size, self._largest_payload)
        if self._always and len(job.samples) > 1 and len(job.versions) == 1:
            return [self._bundle(node, job, equal, size)]
        results: list[ResultArrived | BundleArrived] = []
        for sample in job.samples:
            status, problem = self._always or self._fate()
            reward = 1.0 if equal else float(sample)
            versions = job.versions if status == "ok" else ()
            payload = cast(memoryview, Payload(lease, (sample,), versions, size))
            results.append(ResultArrived(node, lease, sample, status, reward, versions, job.tokens, payload, problem))
        return results

    def _bundle(self, node: str, job: Job, equal: bool, size: int) -> BundleArrived:
        samples, (run,) = job.samples, job.versions
        rewards = tuple([1.0 if equal else float(sample) for sample in samples])
        payload = cast(memoryview, Payload(job.lease.lease, samples, job.versions, size * len(samples)))
        tokens = (job.tokens,) * len(samples)
        return BundleArrived(
            node, job.lease.lease, samples, run.version, run.digest, rewards, tokens, tokens, payload
        )

    def _fate(self) -> Fate:
        scenario, draw = self._scenario, next(self._chance)
        if draw < scenario.env_failed:
            return "env_failed", ""
        if draw < scenario.env_failed + scenario.aborted:
            return "aborted", ""
        return "ok", "simulated" if next(self._chance) < scenario.refused else ""

"""Leases: the right and duty of one node to produce some samples of one ticket before a deadline.

Everything random about an attempt comes from (run seed, ticket, try, sample), so who samples it, and when, cannot
change what is asked. A lost node's samples are leased again with the same seeds.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable

from async_rl.version import PolicyId

EVAL_TICKET = -1


def derive(*parts: int | str) -> int:
    """A 63-bit number from its parts (blake2b), the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def train_instance(run_seed: int, ticket: int, try_: int) -> int:
    """The task instance that all samples of a group share."""
    return derive("instance", run_seed, ticket, try_)


def train_seed(run_seed: int, ticket: int, try_: int, sample: int, retry: int) -> int:
    """The whole random state of a training attempt. `retry` counts failures of this one sample: the instance stays,
    the seed changes, lest the same failure come back."""
    return derive("train", run_seed, ticket, try_, sample, retry)


def eval_seed(run_seed: int, instance: int, try_: int) -> int:
    """Independent of the policy, so that two evaluations ask the same."""
    return derive("eval", run_seed, instance, try_)


class OpenLease:
    """What is still owed: `samples` shrinks as results arrive. Evaluation leases have ticket EVAL_TICKET, a `policy`,
    and the instance's number as `instance`."""

    __slots__ = ("deadline", "instance", "lease", "min_version", "node", "policy", "samples", "ticket")

    def __init__(
        self,
        lease: int,
        node: str,
        ticket: int,
        instance: int,
        samples: Iterable[int],
        min_version: int,
        deadline: float,
        policy: PolicyId | None,
    ) -> None:
        self.lease = lease
        self.node = node
        self.ticket = ticket
        self.instance = instance
        self.samples = set(samples)
        self.min_version = min_version
        self.deadline = deadline
        self.policy = policy


class Leases:
    """All open leases. The time-out is one constant, so deadlines fall due in the order of granting: a queue."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.next_lease = 0
        self.open: dict[int, OpenLease] = {}
        self._by_deadline: deque[OpenLease] = deque()

    def grant(
        self,
        node: str,
        ticket: int,
        instance: int,
        samples: Iterable[int],
        min_version: int,
        now: float,
        policy: PolicyId | None = None,
    ) -> OpenLease:
        lease = OpenLease(
            self.next_lease, node, ticket, instance, samples, min_version, now + self.timeout, policy
        )  # fmt: skip
        self.next_lease += 1
        self.open[lease.lease] = lease
        self._drop_closed()
        self._by_deadline.append(lease)
        return lease

    def close_sample(self, lease: OpenLease, sample: int) -> bool:
        """One sample is no longer owed; True when it was the lease's last."""
        lease.samples.remove(sample)
        if not lease.samples:
            del self.open[lease.lease]
        return not lease.samples

    def expired(self, now: float) -> list[OpenLease]:
        """Open leases whose deadline has passed, oldest first; they stay open until their samples are closed."""
        out = []
        while self._by_deadline and (self._by_deadline[0].deadline <= now or not self._by_deadline[0].samples):
            lease = self._by_deadline.popleft()
            if lease.samples:
                out.append(lease)
        return out

    def was_issued(self, lease: int) -> bool:
        """Whether such a lease can ever have existed (in this run or before a resume)."""
        return 0 <= lease < self.next_lease

    def _drop_closed(self) -> None:
        while self._by_deadline and not self._by_deadline[0].samples:
            self._by_deadline.popleft()

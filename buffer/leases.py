"""Leases: the right and duty of one node to produce some samples of one ticket before a deadline.

Everything random about an attempt comes from (run seed, ticket, try, sample, retry), so who samples it, and when,
cannot change what is asked. A lost node's samples are leased again with the same seeds.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from async_rl.trajectory import EncodedTrajectory
from async_rl.version import PolicyId
from buffer.ledger import Account, members
from buffer.nodes import Node

EVAL_TICKET = -1
PAGE = 256  # leases; one that stays open for long keeps 4 kB from being freed
WORDS = 8  # of 64 bits in one blake2b hash

_words = struct.Struct(f"<{WORDS}Q").unpack


def derive(text: str) -> int:
    """A 63-bit number from a text (blake2b), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def train_instance(run_seed: int, ticket: int, try_: int) -> int:
    """The task instance that all samples of a group share."""
    return derive(f"instance/{run_seed}/{ticket}/{try_}")


def train_seeds(
    run_seed: int, ticket: int, try_: int, samples: Sequence[int], retries: Mapping[int, int]
) -> tuple[int, ...]:
    """63 bits for each of `samples` (rising): the whole random state of a training attempt. `retries` counts the
    failures of a sample: the instance stays, the seed changes, lest the same failure come back."""
    if retries:
        return tuple([_seeds(run_seed, ticket, try_, retries.get(s, 0), s // WORDS)[s % WORDS] for s in samples])
    seeds = _seeds(run_seed, ticket, try_, 0, 0)
    for block in range(1, samples[-1] // WORDS + 1):
        seeds += _seeds(run_seed, ticket, try_, 0, block)
    return tuple([seeds[sample] for sample in samples] if len(samples) < len(seeds) else seeds)


def _seeds(run_seed: int, ticket: int, try_: int, retry: int, block: int) -> list[int]:
    """Those of samples 8 * block .. 8 * block + 7 after `retry` failures: one hash for all of them."""
    text = f"train/{run_seed}/{ticket}/{try_}/{retry}/{block}"
    return [word >> 1 for word in _words(hashlib.blake2b(text.encode()).digest())]


def eval_seed(run_seed: int, eval_set: str, instance: int, sample: int, try_: int) -> int:
    """Independent of the policy, so that two evaluations ask the same."""
    return derive(f"eval/{run_seed}/{eval_set}/{instance}/{sample}/{try_}")


class Held(msgspec.Struct, frozen=True, gc=False):
    """Good attempts of a lease that came in one payload, one or a bundle: `samples` is their mask. `lowest` and
    `highest` are of their rewards. `oldest` is the version of the oldest sampled token of each (with on_stale = "mask"
    of its newest: see async_rl.version.judged_version); `arrived` the batches confirmed when they came, `since` the
    time; `nbytes` the size of the payload, which restored attempts may have lost."""

    samples: int
    lowest: float
    highest: float
    oldest: int
    payload: EncodedTrajectory
    arrived: int
    since: float
    nbytes: int


def samples_of(held: Iterable[Held]) -> int:
    """The mask of all their samples."""
    mask = 0
    for each in held:
        mask |= each.samples
    return mask


class LeaseRecord(Account):
    """A lease, with what came of it, from the grant until all its attempts are at an end.

    `leased` is the mask of what is still owed; while it is not 0 the lease is open. `holder` is the life of the node
    that has it. `held` are its good attempts in the order of their arrival."""

    __slots__ = ("held", "holder", "min_version", "ticket")

    def __init__(self, lease: int, holder: Node, ticket: int, min_version: int) -> None:
        self.lease = lease
        self.leased = self.ready = self.batched = 0
        self.holder = holder
        self.ticket = ticket
        self.min_version = min_version
        self.held: tuple[Held, ...] = ()

    @property
    def node(self) -> str:
        return self.holder.name

    @property
    def samples(self) -> tuple[int, ...]:
        """What is still owed."""
        return members(self.leased)


class EvalLease(LeaseRecord):
    """Has the ticket EVAL_TICKET, and holds nothing: only its reward is kept, elsewhere. `place` is which of the
    evaluation's samples it is, counted through all instances."""

    __slots__ = ("place", "policy")

    def __init__(self, lease: int, holder: Node, place: int, policy: PolicyId) -> None:
        super().__init__(lease, holder, EVAL_TICKET, policy.version)
        self.place = place
        self.policy = policy


class Page:
    """PAGE leases in a row: those that are open, how many these are, and when each falls due."""

    __slots__ = ("count", "deadlines", "records")

    def __init__(self) -> None:
        self.count = 0
        self.records: list[LeaseRecord | None] = [None] * PAGE
        self.deadlines = array("d", bytes(8 * PAGE))


class Leases:
    """All open leases. The time-out is one constant, so they fall due in the order of granting, which is that of their
    numbers: no queue is needed, only how far it has been looked at.

    Numbers rise by `step` from `first`: of several shards each has its own, so that a lease names its shard.

    A record is small and they lie in pages because there may be a million, and what a result costs then is the number
    of places that it touches in memory which nobody has touched for long."""

    def __init__(self, timeout: float, first: int = 0, step: int = 1) -> None:
        self.timeout = timeout
        self.granted = 0
        """How many leases there were."""
        self._first, self._step = first, step
        self._pages: dict[int, Page] = {}
        self._looked_at = 0

    @property
    def next_lease(self) -> int:
        return self.granted * self._step + self._first

    def grant(self, holder: Node, ticket: int, min_version: int, now: float) -> LeaseRecord:
        """A training lease with an empty account: the ledger issues its attempts."""
        return self._open(LeaseRecord(self.next_lease, holder, ticket, min_version), now)

    def grant_evaluation(self, holder: Node, place: int, policy: PolicyId, now: float) -> EvalLease:
        record = EvalLease(self.next_lease, holder, place, policy)
        self._open(record, now)
        return record

    def _open(self, record: LeaseRecord, now: float) -> LeaseRecord:
        place = self.granted
        page = self._pages.get(place // PAGE)
        if page is None:
            page = self._pages[place // PAGE] = Page()
        page.count += 1
        page.records[place % PAGE] = record
        page.deadlines[place % PAGE] = now + self.timeout
        self.granted = place + 1
        return record

    def find(self, lease: int) -> LeaseRecord | None:
        """The lease, if it is open."""
        place, shard = divmod(lease, self._step)
        page = self._pages.get(place // PAGE)
        return None if page is None or shard != self._first else page.records[place % PAGE]

    def holder(self, lease: int) -> str:
        """Whose lease it is, if it is open; empty otherwise."""
        record = self.find(lease)
        return "" if record is None else record.holder.name

    def close(self, record: LeaseRecord) -> None:
        """Nothing is owed under it any more."""
        place = record.lease // self._step
        page = self._pages[place // PAGE]
        page.records[place % PAGE] = None
        page.count -= 1
        if not page.count:
            del self._pages[place // PAGE]

    @property
    def open(self) -> dict[int, LeaseRecord]:
        """All of them, oldest first. O(open): for people, and for the end."""
        records = [record for number in sorted(self._pages) for record in self._pages[number].records]
        return {record.lease: record for record in records if record is not None}

    def expired(self, now: float) -> list[LeaseRecord]:
        """Open leases whose deadline has passed, oldest first, each told of once; they stay open until they are
        closed. Looks at every lease once in its life."""
        out = []
        while self._looked_at < self.granted:
            page = self._pages.get(self._looked_at // PAGE)
            record = None if page is None else page.records[self._looked_at % PAGE]
            if page is not None and record is not None:
                if page.deadlines[self._looked_at % PAGE] > now:
                    break
                out.append(record)
            self._looked_at += 1
        return out

    def resume_at(self, next_lease: int) -> None:
        """Leases below were granted before a resume, and are closed."""
        self.granted = self._looked_at = next_lease // self._step

    def was_issued(self, lease: int) -> bool:
        """Whether such a lease can ever have existed (in this run or before a resume)."""
        return 0 <= lease < self.next_lease and lease % self._step == self._first

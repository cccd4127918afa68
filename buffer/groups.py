"""Groups: what becomes of a ticket, from its first lease until a confirmed batch has spent it.

    missing -> leased -> held -> (group complete) -> ready -> lent -> spent
       ^_________|_________|________________________|
       lost, failed, refused, cancelled | zero variance, short | stale

`missing` samples are leased together, to one node; several leases of one ticket may be open at once (the rest of a
first one, and a retry). A group is complete when nothing is missing and nothing is leased.

What a failure costs. A lost node and a cancelled lease cost nothing: same instance, same seed. A failed environment and
a refused result cost that sample one retry: same instance (all samples of a group share it), new seed. Zero variance
and a short group cost the ticket a try: new instance, all samples anew; and so does an instance that was retired
(buffer.instances) while samples of its group are missing and none is leased. A sample's retries and its ticket's tries
count together; at `max_tries` the run ends, so that a broken task or node cannot loop for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from async_rl.version import is_stale
from async_rl.wire.messages import Outcome, Progress
from buffer.admission import TicketQueue
from buffer.capacity import Credit
from buffer.instances import Instances
from buffer.leases import Held, LeaseRecord, samples_of
from buffer.ledger import TRAINING, Ledger, members
from buffer.newest import NewestFirst
from buffer.order import Order
from buffer.reuse import SHORT, Pool, lent_again
from buffer.rules import OnShortGroup, Rules, ZeroVariance

Verdict = Literal["incomplete", "ready", "zero_variance", "short_group"]
Renewal = Verdict | Literal["retired"]

NO_RETRIES: Mapping[int, int] = MappingProxyType({})


class Group:
    """A ticket's present try. `missing_mask` has a bit for each sample that waits to be leased; what is leased or held
    is with the `leases` of this try, so that a result touches its lease alone, and the group only when the lease is
    closed. There may be a million of these."""

    __slots__ = (
        "failed", "instance", "leased_at", "leases", "mishaps", "missing_mask", "open_leases", "payload_bytes", "ready",
        "reserved", "retries", "ticket", "try_",
    )  # fmt: skip

    def __init__(self, ticket: int, try_: int, instance: int, group_size: int, leased_at: float) -> None:
        self.ticket = ticket
        self.leased_at = leased_at  # the first time
        self.reserved = False
        self.begin(try_, instance, group_size)

    def begin(self, try_: int, instance: int, group_size: int) -> None:
        """A try: all samples are missing."""
        self.try_ = try_
        self.instance = instance
        self.missing_mask = (1 << group_size) - 1
        self.open_leases = 0
        self.leases: tuple[LeaseRecord, ...] = ()
        self.failed: tuple[int, ...] = ()  # given up, unless on_short_group is retry
        self.retries: Mapping[int, int] = NO_RETRIES
        self.mishaps: Mapping[int, int] = NO_RETRIES  # as retries, but with the same seed
        self.payload_bytes = 0  # once it is ready, and of what the sweep leaves of it
        self.ready = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The samples that wait to be leased."""
        return members(self.missing_mask)

    @property
    def out(self) -> int:
        """How many samples are leased."""
        return sum(record.leased.bit_count() for record in self.leases)

    @property
    def good(self) -> int:
        """How many good attempts there are."""
        return samples_of(each for record in self.leases for each in record.held).bit_count()

    @property
    def held(self) -> list[Held]:
        """The good attempts, in the order of their samples (of bundles, of the first ones)."""
        return sorted([each for record in self.leases for each in record.held], key=first_sample)


def verdict(group: Group, on_short_group: OnShortGroup, zero_variance: ZeroVariance) -> Verdict:
    """What a group is, now that one of its leases was closed."""
    if group.open_leases or group.missing_mask:
        return "incomplete"
    if group.failed and (on_short_group == "drop" or group.good < 2):
        return "short_group"
    if zero_variance == "refill":
        held = group.held
        if group.good > 1 and min(each.lowest for each in held) == max(each.highest for each in held):
            return "zero_variance"
    return "ready"


def first_sample(held: Held) -> int:
    """Orders payloads: the lowest bit of their samples."""
    return held.samples & -held.samples


class Groups:
    """All unspent tickets that were made, with the queue, order, credit and ledger that they move through.

    `exhausted` is not empty once a ticket has used up its tries: the run must end with that message."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.ledger = Ledger(TRAINING)
        self.queue = TicketQueue(rules.steps * rules.fresh_groups)
        self.order = order_of(rules)
        self.instances = Instances(rules)
        self.pool = Pool(rules.run_seed, rules.reuse, rules.max_staleness)
        self.credit = Credit(rules.capacity_bytes, rules.group_bytes)
        self.by_ticket: dict[int, Group] = {}
        self.exhausted = ""
        self._all_samples = tuple(range(rules.group_size))
        self._all_mask = (1 << rules.group_size) - 1
        # What the sweep looks at, and nothing else: tickets by a version that no token of one of their leases is older
        # than, and these versions as a heap.
        self._by_age: dict[int, list[int]] = {}
        self.emptied: list[int] = []  # tickets of which the last sweep has left nothing
        self._ages: list[int] = []

    # --- leasing -----------------------------------------------------------------------------------------------------

    def has_credit(self, ticket: int) -> bool:
        """Whether capacity lets `ticket` be leased (see buffer.capacity for the exemption)."""
        if self.credit.admits_one_more:
            return True
        group = self.by_ticket.get(ticket)
        if group is not None and group.reserved:
            return True
        return not self.order.batch_ready and ticket == self.order.oldest_unsettled()

    def take_lowest(self, now: float) -> Group:
        """Take the queue's lowest ticket; all its missing samples are the caller's to lease."""
        ticket = self.queue.take()
        group = self.by_ticket.get(ticket)
        if group is None:
            group = self._make(ticket, 0, now)
        elif not group.open_leases and self.instances.is_retired(group.instance):
            self._renew(group, "retired")
            self.queue.take()  # and the queue has it again
        if not group.reserved:
            self.credit.reserve(in_place_of=group.payload_bytes)
            group.reserved, group.payload_bytes = True, 0
        return group

    def lease(self, group: Group, record: LeaseRecord) -> tuple[int, ...]:
        """All missing samples of the group go out under this lease."""
        mask = group.missing_mask
        samples = self._all_samples if mask == self._all_mask else members(mask)
        group.missing_mask = 0
        group.open_leases += 1
        if group.leases:
            group.leases = (*[each for each in group.leases if each.leased or each.ready], record)
        else:
            group.leases = (record,)
        self.ledger.issue(record, mask)
        self.enter_age(group.ticket, record.min_version)
        return samples

    def _make(self, ticket: int, try_: int, now: float) -> Group:
        group = Group(ticket, try_, self._choose(ticket, try_), self._rules.group_size, now)
        self.by_ticket[ticket] = group
        self.order.made(ticket)
        return group

    # --- closing attempts --------------------------------------------------------------------------------------------

    def accept(self, record: LeaseRecord, samples: int) -> None:
        """Good results: they lie in `record.held` already."""
        self.ledger.move(record, samples, "leased", "ready")

    def give_back(self, record: LeaseRecord, samples: int, why: Literal["node_lost", "cancelled", "stale"]) -> None:
        """Attempts ended through no fault of the samples: leased again as they were."""
        self.ledger.move(record, samples, "leased", f"dropped.{why}")
        self._miss(self.by_ticket[record.ticket], samples)

    def fail(
        self, record: LeaseRecord, sample: int, why: Literal["env_failed", "refused", "cancelled"], detail: str
    ) -> None:
        """An attempt failed on its node ("cancelled": the node gave it up): retried with a new seed, unless short
        groups are to be dropped or accepted and it was the environment that failed. Anything else says nothing about
        the instance, so it is always retried. Each costs a try: what always fails must not go round for ever."""
        group = self.by_ticket[record.ticket]
        self.ledger.move(record, 1 << sample, "leased", f"dropped.{why}")
        if why == "env_failed" and self._rules.on_short_group != "retry":
            group.failed += (sample,)
            return
        if self._rules.deterministic and why != "env_failed":  # chance, which must not decide what is sampled
            group.mishaps = {**group.mishaps, sample: group.mishaps.get(sample, 0) + 1}
        else:
            group.retries = {**group.retries, sample: group.retries.get(sample, 0) + 1}
        failures = group.retries.get(sample, 0) + group.mishaps.get(sample, 0)
        self._check_tries(group, group.try_ + failures, f"sample {sample}: {why}: {detail}")
        self._miss(group, 1 << sample)

    def lease_closed(self, record: LeaseRecord) -> None:
        """Nothing is owed under this lease any more: what is the group now?"""
        group = self.by_ticket[record.ticket]
        group.open_leases -= 1
        outcome = verdict(group, self._rules.on_short_group, self._rules.zero_variance)
        if outcome == "ready":
            group.ready, group.reserved = True, False
            group.payload_bytes = sum([held.nbytes for record in group.leases for held in record.held])
            self.credit.became_ready(group.payload_bytes)
            self.order.ready(group.ticket, min(held.oldest for record in group.leases for held in record.held))
        elif outcome != "incomplete":
            self._renew(group, outcome)

    def _miss(self, group: Group, samples: int) -> None:
        group.missing_mask |= samples
        self.queue.reopen(group.ticket)

    def _check_tries(self, group: Group, tries: int, why: str) -> None:
        if tries >= self._rules.max_tries and not self.exhausted:
            self.exhausted = (
                f"ticket {self._rules.ticket(group.ticket)} has failed {tries} times, which is buffer.max_tries "
                f"(task instance {group.instance}, last {why}): look at the task, or raise buffer.max_tries"
            )

    def _choose(self, ticket: int, try_: int) -> int:
        self.exhausted = self.exhausted or self.instances.why_none()
        return self.instances.choose(self._rules.ticket(ticket), try_)

    def _renew(self, group: Group, why: Renewal) -> None:
        """Drop all attempts; the ticket starts again with another instance. A reservation stays."""
        self._move_held([group], "ready", f"dropped.{why}")
        self.credit.dropped(group.payload_bytes)  # of one that became too old in part
        try_ = group.try_ + 1
        self._check_tries(group, try_, why)
        group.begin(try_, self._choose(group.ticket, try_), self._rules.group_size)
        self.queue.reopen(group.ticket)

    def _move_held(self, groups: Iterable[Group], start: Literal["ready", "batched"], end: str) -> None:
        """All attempts of these groups that are at `start`."""
        move = self.ledger.move
        for group in groups:
            for record in group.leases:
                samples = record.ready if start == "ready" else record.batched
                if samples:
                    move(record, samples, start, end)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, version: int) -> list[Group] | None:
        """The groups of the batch for this version, the fresh ones first, or None when it is not complete yet."""
        if not self.order.batch_ready:
            return None
        groups = [self.by_ticket[ticket] for ticket in self.order.draw()]
        self._move_held(groups, "ready", "batched")
        self.credit.drawn(sum([group.payload_bytes for group in groups]), keep=self._rules.reuse > 1)
        return groups + self.pool.draw(version, self._rules.groups_per_step - len(groups))

    def lent_attempts(self, lent: Iterable[Group]) -> dict[int, int]:
        """The attempts of a batch that is lent: a mask of samples for each lease."""
        masks: dict[int, int] = {}
        for group in lent:
            if self.pool.uses(group.ticket):
                masks |= lent_again(group)
            else:
                masks |= {record.lease: record.batched for record in group.leases}
        return masks

    def confirm(self, lent: Sequence[Group], outcomes: Mapping[Outcome, Mapping[int, int]], version: int) -> None:
        """A batch is confirmed, and the next one is of `version`. Its tickets are spent; their payloads are freed, or
        kept as long as they may be used again. What trained before stays trained: only its reuse is counted."""
        again = {record.lease for group in lent if self.pool.uses(group.ticket) for record in group.leases}
        accounts = {record.lease: record for group in lent for record in group.leases}
        for outcome, attempts in outcomes.items():
            end = "trained" if outcome == "trained" else f"dropped.{outcome}"
            for number, samples in attempts.items():
                if number in again:
                    self.pool.count(outcome, samples.bit_count())
                else:
                    self.ledger.move(accounts[number], samples, "batched", end)
        for group in lent:
            self.by_ticket.pop(group.ticket, None)
        if self._rules.reuse > 1:
            self.pool.counts[SHORT] += len(lent) < self._rules.groups_per_step
            for group in self.pool.confirmed(lent, outcomes.get("trained", {}), version):
                self.credit.released(group.payload_bytes)

    # --- age ---------------------------------------------------------------------------------------------------------

    def enter_age(self, ticket: int, version: int) -> None:
        """The sweep is to look at `ticket` when tokens of `version` have become too old."""
        tickets = self._by_age.get(version)
        if tickets is None:
            tickets = self._by_age[version] = []
            heapq.heappush(self._ages, version)
        tickets.append(ticket)

    def sweep(self, version: int) -> None:
        """Drop held attempts too old for a step from `version`, and open their tickets again. This only saves work
        (the trainer enforces the bound); with K_a as configured admission leaves nothing to sweep. Costs what it
        drops, and a look at each ticket whose age has come."""
        reopened: list[int] = []
        self.emptied = []
        while self._ages and self._is_stale(version, self._ages[0]):
            for ticket in self._by_age.pop(heapq.heappop(self._ages)):
                group = self.by_ticket.get(ticket)
                if group is None or not group.leases:
                    continue  # spent, or about to begin again
                was_ready = group.ready
                if self._drop_stale(group, version):
                    if was_ready:
                        reopened.append(ticket)
                    if not any(record.held for record in group.leases):
                        self.emptied.append(ticket)
        if reopened:
            self.order.reopened(reopened)

    def _is_stale(self, version: int, oldest: int) -> bool:
        return is_stale(version, oldest, self._rules.max_staleness)

    def _drop_stale(self, group: Group, version: int) -> bool:
        """Whether there was anything to drop; what is left is looked at again when its own age has come."""
        held = group.held
        fresh = [each.oldest for each in held if not self._is_stale(version, each.oldest)]
        if fresh:
            self.enter_age(group.ticket, min(fresh))
        if len(fresh) == len(held):
            return False
        missed = 0
        for record in group.leases:
            stale = [each for each in record.held if self._is_stale(version, each.oldest)]
            if not stale:
                continue
            samples = samples_of(stale)
            self.ledger.move(record, samples, "ready", "dropped.stale")
            record.held = tuple([each for each in record.held if not self._is_stale(version, each.oldest)])
            missed |= samples
            if not group.reserved:  # it is ready, or was and is not leased again yet
                dropped_bytes = sum([each.nbytes for each in stale])
                self.credit.dropped(dropped_bytes)
                group.payload_bytes -= dropped_bytes
                group.ready = False
        self._miss(group, missed)
        return True

    # --- the end, and the beginning ----------------------------------------------------------------------------------

    def close(self, lent: Iterable[Group]) -> None:
        """Cancel every attempt that is held or lent, and free its payload; those who know the leases have closed them.
        The tickets stay known as unspent, so that `open_tickets` remains true."""
        self._move_held(lent, "batched", "dropped.cancelled")
        self._move_held(self.by_ticket.values(), "ready", "dropped.cancelled")
        for group in self.by_ticket.values():
            group.begin(group.try_, group.instance, self._rules.group_size)
            group.reserved = False
        self.queue.close()
        self.order = order_of(self._rules)
        self.pool.close()
        self.credit = Credit(self._rules.capacity_bytes, self._rules.group_bytes)

    def open_tickets(self) -> dict[int, int]:
        """Unspent tickets that were made, with their try, in order (they are made in rising order)."""
        return {ticket: group.try_ for ticket, group in self.by_ticket.items()}

    def adopt(self, rules: Rules) -> None:
        """Go on by other rules; those that tickets were made by are the same."""
        self._rules = rules
        self.queue.total = max(rules.steps * rules.fresh_groups, self.queue.next_ticket)
        self.instances.adopt(rules)
        self.credit.adopt(rules.capacity_bytes, rules.group_bytes)

    def unspent(self) -> list[int]:
        """Tickets whose payloads somebody may still ask for: not in a confirmed batch yet, or to be used again."""
        return [*self.by_ticket, *self.pool.tickets]

    def fits(self, progress: Progress) -> bool:
        """Whether this could be the progress of a run."""
        below = max(progress.open_tickets, default=-1) < progress.next_ticket
        return below and self.ledger.fits(progress.ledger)

    def resume(self, progress: Progress, now: float) -> None:
        """Take up a checkpoint's tickets and totals; what was open is sampled anew."""
        self.ledger.resume(progress.ledger)
        self.pool.counts.update(progress.reused)
        self.queue.next_ticket = progress.next_ticket
        for ticket in sorted(progress.open_tickets):
            self._make(ticket, progress.open_tickets[ticket], now)
            self.queue.reopen(ticket)
        self.order.resume_at(progress.next_ticket)


def order_of(rules: Rules) -> Order:
    return NewestFirst(rules.fresh_groups) if rules.newest_first else Order(rules.fresh_groups, rules.window)

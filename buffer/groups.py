"""Groups: what becomes of a ticket, from its first lease until a confirmed batch has spent it.

    missing -> leased -> held -> (group complete) -> ready -> lent -> spent
       ^_________|_________|________________________|
       lost, failed, refused, cancelled | zero variance, short | stale

`missing` samples are leased together, to one node; several leases of one ticket may be open at once (the rest of a
first one, and a retry). A group is complete when nothing is missing and nothing is leased.

What a failure costs. A lost node and a cancelled lease cost nothing: same instance, same seed. A failed environment and
a refused result cost that sample one retry: same instance (all samples of a group share it), new seed. Zero variance
and a short group cost the ticket a try: new instance, all samples anew. A sample's retries and its ticket's tries count
together; at `max_tries` the run ends, so that a broken task or node cannot loop for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from async_rl.version import is_stale
from async_rl.wire.messages import BatchGroup, Progress
from buffer.admission import TicketQueue
from buffer.capacity import Credit
from buffer.leases import train_instance
from buffer.ledger import TRAINING, Ledger
from buffer.order import Order
from buffer.rules import OnShortGroup, Rules, ZeroVariance

Verdict = Literal["incomplete", "ready", "zero_variance", "short_group"]


class Held(NamedTuple):
    """A good attempt, held here: `oldest` is the version of its oldest sampled token; `arrived` the batches confirmed
    when it came, `since` the time."""

    lease: int
    reward: float
    oldest: int
    payload: bytes
    arrived: int
    since: float


class Group:
    __slots__ = (
        "failed", "good", "instance", "leased_at", "missing", "out", "ready", "reserved", "retries", "ticket", "try_",
    )  # fmt: skip

    def __init__(self, ticket: int, try_: int, instance: int, group_size: int, leased_at: float) -> None:
        self.ticket = ticket
        self.leased_at = leased_at  # the first time
        self.try_ = try_
        self.instance = instance
        self.missing = set(range(group_size))
        self.out = 0  # samples leased
        self.good: dict[int, Held] = {}
        self.failed: set[int] = set()  # given up, unless on_short_group is retry
        self.retries: dict[int, int] = {}
        self.ready = False
        self.reserved = False

    @property
    def payload_bytes(self) -> int:
        return sum(len(held.payload) for held in self.good.values())


def verdict(group: Group, on_short_group: OnShortGroup, zero_variance: ZeroVariance) -> Verdict:
    """What a group is, now that one of its samples was closed."""
    if group.missing or group.out:
        return "incomplete"
    if group.failed and (on_short_group == "drop" or len(group.good) < 2):
        return "short_group"
    if zero_variance == "refill" and len(group.good) > 1 and len({held.reward for held in group.good.values()}) == 1:
        return "zero_variance"
    return "ready"


class Groups:
    """All unspent tickets that were made, with the queue, order, credit and ledger that they move through.

    `exhausted` is not empty once a ticket has used up its tries: the run must end with that message."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.ledger = Ledger(TRAINING)
        self.queue = TicketQueue(rules.steps * rules.groups_per_step)
        self.order = Order(rules.groups_per_step, rules.window)
        self.credit = Credit(rules.capacity_bytes, rules.group_bytes)
        self.by_ticket: dict[int, Group] = {}
        self.exhausted = ""
        # Attempts held, by the version of their oldest token: what the sweep looks at, and nothing else.
        self._by_age: dict[int, list[tuple[int, int, int]]] = {}

    # --- leasing -----------------------------------------------------------------------------------------------------

    def has_credit(self, ticket: int) -> bool:
        """Whether capacity lets `ticket` be leased (see buffer.capacity for the exemption)."""
        group = self.by_ticket.get(ticket)
        if group is not None and group.reserved:
            return True
        return self.credit.admits(not self.order.batch_ready and ticket == self.order.oldest_unsettled())

    def lease_lowest(self, now: float) -> tuple[Group, list[int]]:
        """Take the queue's lowest ticket; all its missing samples, in order, are the caller's to lease."""
        ticket = self.queue.take()
        group = self.by_ticket.get(ticket)
        if group is None:
            group = self._make(ticket, 0, now)
        if not group.reserved:
            self.credit.reserve()
            group.reserved = True
        samples = sorted(group.missing)
        group.missing.clear()
        group.out += len(samples)
        return group, samples

    def _make(self, ticket: int, try_: int, now: float) -> Group:
        group = Group(ticket, try_, train_instance(self._rules.run_seed, ticket, try_), self._rules.group_size, now)
        self.by_ticket[ticket] = group
        self.order.made(ticket)
        return group

    # --- closing attempts --------------------------------------------------------------------------------------------

    def accept(self, ticket: int, sample: int, held: Held) -> None:
        """A good result."""
        group = self.by_ticket[ticket]
        self.ledger.move((held.lease, sample), "leased", "ready")
        group.out -= 1
        group.good[sample] = held
        self._by_age.setdefault(held.oldest, []).append((ticket, sample, held.lease))
        self._settle(group)

    def give_back(self, ticket: int, lease: int, sample: int, why: Literal["node_lost", "cancelled", "stale"]) -> None:
        """An attempt ended through no fault of the sample: leased again as it was."""
        group = self.by_ticket[ticket]
        self.ledger.move((lease, sample), "leased", f"dropped.{why}")
        group.out -= 1
        self._miss(group, sample)

    def fail(
        self, ticket: int, lease: int, sample: int, why: Literal["env_failed", "refused", "cancelled"], detail: str
    ) -> None:
        """An attempt failed on its node ("cancelled": the node gave it up): retried with a new seed, unless short
        groups are to be dropped or accepted and it was the environment that failed. Anything else says nothing about
        the instance, so it is always retried. Each costs a try: what always fails must not go round for ever."""
        group = self.by_ticket[ticket]
        self.ledger.move((lease, sample), "leased", f"dropped.{why}")
        group.out -= 1
        if why == "env_failed" and self._rules.on_short_group != "retry":
            group.failed.add(sample)
            self._settle(group)
            return
        group.retries[sample] = group.retries.get(sample, 0) + 1
        self._check_tries(group, group.try_ + group.retries[sample], f"sample {sample}: {why}: {detail}")
        self._miss(group, sample)

    def _miss(self, group: Group, sample: int) -> None:
        group.missing.add(sample)
        self.queue.reopen(group.ticket)

    def _check_tries(self, group: Group, tries: int, why: str) -> None:
        if tries >= self._rules.max_tries and not self.exhausted:
            self.exhausted = (
                f"ticket {group.ticket} has failed {tries} times, which is buffer.max_tries "
                f"(task instance {group.instance}, last {why}): look at the task, or raise buffer.max_tries"
            )

    def _settle(self, group: Group) -> None:
        """Act on the verdict after a sample was closed."""
        outcome = verdict(group, self._rules.on_short_group, self._rules.zero_variance)
        if outcome == "ready":
            group.ready, group.reserved = True, False
            self.credit.became_ready(group.payload_bytes)
            self.order.ready(group.ticket)
        elif outcome != "incomplete":
            self._renew(group, outcome)

    def _renew(self, group: Group, why: Verdict) -> None:
        """Drop all attempts; the ticket starts again with another instance. Its reservation stays."""
        for sample, held in group.good.items():
            self.ledger.move((held.lease, sample), "ready", f"dropped.{why}")
        group.good.clear()
        group.failed.clear()
        group.retries.clear()
        group.try_ += 1
        self._check_tries(group, group.try_, why)
        group.instance = train_instance(self._rules.run_seed, group.ticket, group.try_)
        group.missing = set(range(self._rules.group_size))
        self.queue.reopen(group.ticket)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self) -> list[Group] | None:
        """The next batch's groups, or None when it is not complete yet."""
        if not self.order.batch_ready:
            return None
        groups = [self.by_ticket[ticket] for ticket in self.order.draw()]
        for group in groups:
            self.credit.drawn(group.payload_bytes)
            for sample, held in group.good.items():
                self.ledger.move((held.lease, sample), "ready", "batched")
        return groups

    def spend(self, groups: Sequence[Group]) -> None:
        """A confirmed batch: its tickets are spent and their payloads freed."""
        for group in groups:
            del self.by_ticket[group.ticket]

    def sweep(self, version: int) -> None:
        """Drop held attempts too old for a step from `version`, and open their tickets again. This only saves work
        (the trainer enforces the bound); with K_a as configured admission leaves nothing to sweep. Costs what it
        drops, and a look at each age held."""
        reopened: list[int] = []
        for age in [age for age in self._by_age if is_stale(version, age, self._rules.max_staleness)]:
            for ticket, sample, lease in self._by_age.pop(age):
                group = self.by_ticket.get(ticket)
                held = group.good.get(sample) if group is not None else None
                if group is None or held is None or held.lease != lease:
                    continue  # trained, or dropped for another reason
                if group.ready:
                    self.credit.no_longer_ready(group.payload_bytes)
                    group.ready, group.reserved = False, True
                    reopened.append(ticket)
                self.ledger.move((lease, sample), "ready", "dropped.stale")
                del group.good[sample]
                self._miss(group, sample)
        if reopened:
            self.order.reopened(reopened)

    # --- the end, and the beginning ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel every held attempt and free its payload; leased and lent ones are closed by those who know them.
        The tickets stay known as unspent, so that `open_tickets` remains true."""
        for group in self.by_ticket.values():
            for sample, held in group.good.items():
                self.ledger.move((held.lease, sample), "ready", "dropped.cancelled")
            group.good.clear()
            group.ready = group.reserved = False
        self.queue.close()
        self.order = Order(self._rules.groups_per_step, self._rules.window)
        self.credit = Credit(self._rules.capacity_bytes, self._rules.group_bytes)

    def open_tickets(self) -> dict[int, int]:
        """Unspent tickets that were made, with their try, in order."""
        return {ticket: self.by_ticket[ticket].try_ for ticket in sorted(self.by_ticket)}

    def resume(self, progress: Progress, now: float) -> None:
        """Take up a checkpoint's tickets and totals; what was open is sampled anew."""
        self.ledger.resume(progress.ledger)
        self.queue.next_ticket = progress.next_ticket
        for ticket in sorted(progress.open_tickets):
            self._make(ticket, progress.open_tickets[ticket], now)
            self.queue.reopen(ticket)
        self.order.resume_at(progress.next_ticket)


def batch_group(group: Group, now: float) -> BatchGroup:
    """How a group that is lent at `now` is named to the trainer."""
    good = [group.good[sample] for sample in sorted(group.good)]
    return BatchGroup(
        group.ticket, group.try_, group.instance, len(good), tuple(held.arrived for held in good),
        tuple(now - held.since for held in good), now - group.leased_at,
    )  # fmt: skip

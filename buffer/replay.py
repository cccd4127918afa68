"""The replay buffer's rules in one place: `Replay.apply(event, now) -> effects`.

This file only composes; each rule has a file of its own: admission (which ticket to which node), groups (what becomes
of a ticket), order (which batch), capacity, leases, nodes, evaluation, ledger. Nothing here reads a clock or a socket.

One group's life, with B = 2, K = 1:

    NodeAttested(a, v0)                  a is ready
    NodeWanted(a, 4)                     -> GrantLease(a, ticket 0), GrantLease(a, ticket 1), ... below (0 + 1 + 1) * 2
    ResultArrived ... of ticket 0        held; with its last sample the group is ready
    DrawRequested(0)                     remembered; when tickets 0 and 1 are ready -> LendBatch(0)
    PolicyRegistered(v1), BatchConfirmed attempts trained, tickets spent, payloads freed
    NodeAttested(a, v1)                  tickets below (1 + 1 + 1) * 2 may go to a

The cost of an event is O(log resident) and does not depend on how many groups, leases or nodes there are, except where
the event itself is about many (a node lost with its leases, a batch, the start of an evaluation).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, Literal

from async_rl.bundle import taken_apart
from async_rl.version import is_stale, judged_version
from async_rl.wire.messages import MAX_EVALUATED, Lease, Progress
from buffer import attesting, bundled, drawing, leaving, restarts
from buffer.adaptive import AdaptiveBound, adaptive_lead
from buffer.admission import least_version, may_lease
from buffer.evaluation import Evaluations
from buffer.events import (
    AnyEvent,
    BufferStarted,
    BundleArrived,
    CancelLease,
    Effect,
    EndRun,
    EvalFinished,
    EvalRequested,
    GrantLease,
    NodeJoined,
    NodeLost,
    NodeWanted,
    NothingFree,
    ResultArrived,
    ResultRefused,
    ResultsArrived,
    RunFinished,
    Ticked,
    TrainerJoined,
)
from buffer.groups import Group, Groups
from buffer.handover import Handovers
from buffer.leases import EvalLease, Held, LeaseRecord, Leases, train_seeds
from buffer.nodes import Node, Nodes, NodeView
from buffer.quarantine import Quarantine
from buffer.results import Refusal, is_owed, only_policy, why_not_owed, why_refused
from buffer.rules import Rules, rules_from_config
from buffer.waiting import who_waits

__all__ = ["Replay", "Rules", "rules_from_config"]


class Replay:
    """Owns all state of one run's buffer. Only `apply` changes it, and the handlers that it calls: those here, and
    those of buffer.attesting, buffer.bundled, buffer.drawing, buffer.leaving and buffer.restarts."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.groups = Groups(rules)
        self.leases = Leases(rules.lease_timeout, rules.shard, rules.shards)
        self.nodes = Nodes()
        self.quarantine = Quarantine(self.nodes, rules.max_staleness)
        self.evaluations = Evaluations(rules.eval_share, rules.max_tries, rules.one_copy)
        self.handovers = Handovers()
        self.confirmed_batches = 0
        self.covered = 0
        self.bound = AdaptiveBound(rules.max_staleness)
        self.trainer: TrainerJoined | None = None
        self.lent: list[Group] | None = None
        self.draw_pending = False
        self.ended = ""
        self.outside_counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self.published: dict[int, set[str]] = {}  # digests by version, of those that still matter

    @staticmethod
    def taken_apart(payload: Any) -> Sequence[Any]:
        """The payloads of a bundle's attempts; nothing else here looks into one."""
        return taken_apart(payload)

    # --- views -------------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> dict[str, int]:
        """Training attempts by place: issued, leased, ready, batched, trained, dropped.<reason>."""
        return self.groups.ledger.counts()

    @property
    def eval_ledger(self) -> dict[str, int]:
        """Evaluation attempts by place: issued, leased, evaluated, dropped.<reason>."""
        return self.evaluations.ledger.counts()

    @property
    def reused(self) -> dict[str, int]:
        """What was lent again and confirmed, beside the ledger, and how many batches were smaller: see buffer.reuse."""
        return dict(self.groups.pool.counts)

    @property
    def lead(self) -> int:
        """K_a, as it is now."""
        return adaptive_lead(self.rules, self.bound.bound) if self.rules.adaptive else self.rules.lead

    @property
    def outside(self) -> dict[str, int]:
        """What changed nothing, by kind: late, unknown_attempt, wrong_node, unknown_node, unregistered_policy,
        repeated_confirm."""
        return dict(self.outside_counts)

    @property
    def refused(self) -> dict[str, int]:
        """Results that closed their attempt as refused, by kind (their sum: dropped.refused before training)."""
        return dict(self._refused)

    @property
    def ready_groups(self) -> int:
        return self.groups.order.ready_groups

    @property
    def ready_bytes(self) -> int:
        return self.groups.credit.ready_bytes

    @property
    def kept_bytes(self) -> int:
        return self.groups.credit.kept_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.groups.credit.reserved_bytes

    def nodes_view(self) -> dict[str, NodeView]:
        return {view.name: view for view in self.nodes.views()}

    def progress(self) -> Progress:
        """What a checkpoint keeps. A batch that is lent and not confirmed counts as undrawn. O(resident groups)."""
        return Progress(
            next_ticket=self.groups.queue.next_ticket,
            open_tickets=self.groups.open_tickets(),
            confirmed_batches=self.confirmed_batches,
            next_lease=self.leases.next_lease,
            ledger=self.ledger,
            eval_ledger=self.eval_ledger,
            reused=self.reused,
        )

    def waiting(self, now: float) -> str:
        """One sentence: who waits for whom."""
        return who_waits(self, now)

    # --- the one entry -----------------------------------------------------------------------------------------------

    def apply(self, event: AnyEvent, now: float) -> list[Effect]:
        """Take one event in, and say what to do. `now`: seconds, monotonic, never less than before."""
        effects: list[Effect] = []
        if isinstance(event, BufferStarted):
            self.ended = self.groups.exhausted = ""
        if self.ended and not isinstance(event, RunFinished):
            self._after_end(event, effects)
            return effects
        self._handlers[type(event)](self, event, now, effects)
        if self.groups.exhausted:
            self.end(self.groups.exhausted, effects)
        if not self.ended:
            if not self.evaluations.idle:
                self._finish_evaluation(now, effects)
                self._lease_evaluation(now, effects)
            if self.draw_pending:
                drawing.lend(self, now, effects)
            if self.handovers.parked:
                leaving.move_leases(self, effects)
            self._lease_training(now, effects)
            if isinstance(event, NodeWanted) and event.once:
                self._answer(event, effects)
        return effects

    def end(self, error: str, effects: list[Effect]) -> None:
        """The run cannot go on: nothing is leased any more. What is open stays so until RunFinished closes it."""
        if not self.ended:
            self.ended = error
            effects.append(EndRun(error))

    def _after_end(self, event: AnyEvent, effects: list[Effect]) -> None:
        results = event.results if isinstance(event, ResultsArrived) else (event,)
        for result in results:
            if isinstance(result, ResultArrived | BundleArrived):
                for sample in result.samples if isinstance(result, BundleArrived) else (result.sample,):
                    self.outside_counts["late"] += 1
                    effects.append(ResultRefused(result.node, result.lease, sample, "the run has ended"))

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node_joined(self, event: NodeJoined, now: float, effects: list[Effect]) -> None:
        earlier = self.nodes.get(event.node)
        if earlier is not None:
            self._lose(earlier, "the node joined again")
        self.nodes.joined(event.node, event.slots, event.logprob_bound, event.life, event.granted)

    def _node_wanted(self, event: NodeWanted, now: float, effects: list[Effect]) -> None:
        node = self.known(event.node)
        if node is not None:
            self.nodes.wants(node, event.total_samples)

    def _answer(self, event: NodeWanted, effects: list[Effect]) -> None:
        """A node that asks several shards is told when to ask the next one, and nothing is kept for it here."""
        node = self.nodes.get(event.node)
        if node is not None and self.nodes.forgets(node):
            effects.append(NothingFree(node.name, node.granted))

    def _node_lost(self, event: NodeLost, now: float, effects: list[Effect]) -> None:
        node = self.known(event.node)
        if node is not None:
            self._lose(node, event.reason)

    def known(self, name: str) -> Node | None:
        node = self.nodes.get(name)
        if node is None:
            self.outside_counts["unknown_node"] += 1
        return node

    def _lose(self, node: Node, reason: str) -> None:
        self.nodes.lost(node, reason)
        for number in sorted(node.leases):
            lease = self.open(number)
            self.take_back(lease, "node_lost", lease.leased)
        self.evaluations.withdraw(node)

    # --- results -----------------------------------------------------------------------------------------------------

    def _result_arrived(self, event: ResultArrived, now: float, effects: list[Effect]) -> None:
        self.deliver(event.lease, (event,), now, effects)

    def _results_arrived(self, event: ResultsArrived, now: float, effects: list[Effect]) -> None:
        kinds: Iterator[tuple[type, Iterator[Any]]] = groupby(event.results, type)
        for kind, results in kinds:
            if kind is BundleArrived:
                for bundle in results:
                    bundled.bundle_arrived(self, bundle, now, effects)
            else:
                for number, own in groupby(results, attrgetter("lease")):
                    self.deliver(number, own, now, effects)

    def deliver(self, number: int, results: Iterable[ResultArrived], now: float, effects: list[Effect]) -> None:
        """Results under one lease. What closes an attempt otherwise is booked at once, the good ones together at the
        end, so that a group that came whole costs one move."""
        lease = self.leases.find(number)
        if lease is None:
            for event in results:
                self._refuse(event, why_not_owed(event, None, 0, self.leases), self.outside_counts, effects)
            return
        owed = lease.leased
        good: list[ResultArrived] = []
        for event in results:
            if not is_owed(event, lease, owed):
                self._refuse(event, why_not_owed(event, lease, owed, self.leases), self.outside_counts, effects)
                continue
            owed ^= 1 << event.sample
            begun = self.handovers.begun_under(number, event.sample)
            exact = self.rules.deterministic
            refusal = why_refused(event, lease, self.published, self.quarantine.proofs, begun, exact)
            if refusal is not None:
                self._refuse(event, refusal, self._refused, effects)
            if isinstance(lease, EvalLease):
                self._close_evaluated(event, lease, refusal)
            elif refusal is not None or event.status != "ok":
                self._close_failed(event, lease, refusal)
            else:
                good.append(event)
        if good:
            self._accept(lease, good, now)

    def _refuse(self, event: ResultArrived, refusal: Refusal, counter: Counter[str], effects: list[Effect]) -> None:
        counter[refusal.kind] += 1
        effects.append(ResultRefused(event.node, event.lease, event.sample, refusal.reason))

    def _accept(self, lease: LeaseRecord, results: Sequence[ResultArrived], now: float) -> None:
        """Good results of a training lease: held, unless they are too old to be drawn."""
        version, bound = self.confirmed_batches, self.rules.max_staleness
        fresh = not is_stale(version, lease.min_version, bound)  # then no token of the lease is
        held: list[Held] = []
        samples = stale = 0
        history = self.groups.instances
        instance = self.groups.by_ticket[lease.ticket].instance if history.count else 0
        for event in results:
            versions, sample = event.versions, event.sample
            if history.count:
                history.note(instance, event.reward)
            judged = versions[0].version if len(versions) == 1 else judged_version(versions, self.rules.on_stale)
            if not fresh:
                if is_stale(version, judged, bound):
                    stale |= 1 << sample
                    continue
                self.groups.enter_age(lease.ticket, judged)
            samples |= 1 << sample
            self.handovers.arrived(lease.lease, sample, versions)
            reward, payload = event.reward, event.payload
            held.append(Held(1 << sample, reward, reward, judged, payload, version, now, len(payload)))
        if stale:
            self.groups.give_back(lease, stale, "stale")  # saves work, as the sweep does
        if samples:
            lease.held += tuple(held)
            self.groups.accept(lease, samples)
        self.closed(lease, len(results))

    def _close_failed(self, event: ResultArrived, lease: LeaseRecord, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.groups.fail(lease, event.sample, "refused", f"{refusal.reason} (from {event.node})")
        elif event.status == "env_failed":
            self.groups.fail(lease, event.sample, "env_failed", f"on {event.node}: {event.note}")
        else:
            self.groups.fail(lease, event.sample, "cancelled", f"given up by {event.node}")
        self.closed(lease, 1)

    def _close_evaluated(self, event: ResultArrived, lease: EvalLease, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.evaluations.failed(lease, "refused")
        elif event.status == "ok":
            self.evaluations.evaluated(lease, event.reward)
        else:
            self.evaluations.failed(lease, "env_failed" if event.status == "env_failed" else "cancelled")
        self.closed(lease, 1)

    # --- closing leases ----------------------------------------------------------------------------------------------

    def closed(self, lease: LeaseRecord, samples: int) -> None:
        """Its node owes so many samples less, as the ledger knows by now."""
        node = lease.holder
        node.leased_samples -= samples
        if not lease.leased:
            self.leases.close(lease)
            self.handovers.closed(lease.lease)
            node.leases.remove(lease.lease)
            if not isinstance(lease, EvalLease):
                self.groups.lease_closed(lease)

    def open(self, number: int) -> LeaseRecord:
        lease = self.leases.find(number)
        assert lease is not None
        return lease

    def take_back(self, lease: LeaseRecord, why: Literal["node_lost", "cancelled"], owed: int) -> None:
        """Close these samples (a mask) that the lease still owes; they are leased again."""
        if not owed:
            return
        if isinstance(lease, EvalLease):
            self.evaluations.dropped(lease, why)
        else:
            self.groups.give_back(lease, owed, why)
        self.closed(lease, owed.bit_count())

    def cancel(self, number: int, reason: str, effects: list[Effect]) -> None:
        """Take back an open lease, whatever it still owes."""
        self._cancel(self.open(number), reason, effects)

    def _cancel(self, lease: LeaseRecord, reason: str, effects: list[Effect]) -> None:
        self.take_back(lease, "cancelled", lease.leased)
        if lease.holder is not self.handovers.nobody:
            effects.append(CancelLease(lease.node, lease.lease, reason))

    def _ticked(self, event: Ticked, now: float, effects: list[Effect]) -> None:
        for lease in self.leases.expired(now):
            self._cancel(lease, f"not delivered within {self.rules.lease_timeout:g} s", effects)
        if nobody := self.quarantine.nobody_left(now, self.rules.quarantine_limit, self._awaited):
            self.end(nobody, effects)

    @property
    def _awaited(self) -> int | None:
        """How many nodes are to be here before the first step; None after it."""
        return self.rules.nodes if self.rules.nodes and not self.confirmed_batches else None

    # --- granting leases ---------------------------------------------------------------------------------------------

    def _lease_training(self, now: float, effects: list[Effect]) -> None:
        """Lowest ticket to the newest waiting node, until one of ticket, node, version or credit is lacking."""
        rules, groups, nodes = self.rules, self.groups, self.nodes
        lowest, fresh_groups, lead = groups.queue.lowest, rules.fresh_groups, self.lead
        while (version := nodes.newest_waiting()) is not None:
            ticket = lowest()
            if ticket is None or not may_lease(ticket, version, lead, fresh_groups):
                return
            if not groups.has_credit(ticket):
                return
            under = least_version(ticket, rules.lead, rules.fresh_groups) if rules.deterministic else version
            node = nodes.first_waiting(version)
            group = groups.take_lowest(now)
            lease = self.leases.grant(node, ticket, under, now)
            samples = groups.lease(group, lease)
            node.leases.add(lease.lease)
            node.leased_samples += len(samples)
            nodes.granted(node, len(samples))
            effects.append(GrantLease(node.name, self.message_of(lease, group, samples)))

    def message_of(self, lease: LeaseRecord, group: Group, samples: tuple[int, ...]) -> Lease:
        """A training lease as its node is told of it."""
        rules = self.rules
        ticket = rules.ticket(group.ticket)
        seeds = train_seeds(rules.run_seed, ticket, group.try_, samples, group.retries)
        return Lease(
            lease.lease, ticket, group.try_, group.instance, "train", samples, seeds, lease.min_version,
            rules.sampling, only_policy(self.published, lease.min_version) if rules.deterministic else None,
        )  # fmt: skip

    def _lease_evaluation(self, now: float, effects: list[Effect]) -> None:
        self.evaluations.start_next(now, self.nodes.ready())
        while (grant := self.evaluations.next_grant()) is not None and self.evaluations.current is not None:
            node, place = grant
            lease = self.leases.grant_evaluation(node, place, self.evaluations.current.policy, now)
            node.leases.add(lease.lease)
            node.leased_samples += 1
            self.evaluations.granted(lease)
            effects.append(GrantLease(node.name, self.evaluations.current.message(lease, self.rules.run_seed)))

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _eval_requested(self, event: EvalRequested, now: float, effects: list[Effect]) -> None:
        if event.n * event.samples > MAX_EVALUATED:
            asked = f"{event.n} instances, {event.samples} samples each"
            self.end(f"evaluation of {asked}: there may be {MAX_EVALUATED} samples in all", effects)
        elif event.policy.digest in self.published.get(event.policy.version, ()):
            self.evaluations.request(event)
        elif event.policy.version < self.covered:  # asked again, and the journal that knew it was lost
            cancelled = event.n * event.samples
            effects.append(EvalFinished(event.policy, 0, math.nan, cancelled, 0.0, event.eval_set))
        else:
            self.end(f"evaluation of policy {event.policy.short()}, which was never published", effects)

    def _finish_evaluation(self, now: float, effects: list[Effect]) -> None:
        if self.evaluations.due(now) and self.evaluations.current is not None:
            for lease in sorted(self.evaluations.current.leases):
                self.cancel(lease, "the evaluation's time is over", effects)
            effects.append(self.evaluations.finish(now))

    # --- the ends ----------------------------------------------------------------------------------------------------

    def _run_finished(self, event: RunFinished, now: float, effects: list[Effect]) -> None:
        self.ended = self.ended or event.reason or "the run has finished"
        for lease in self.leases.open.values():
            self._cancel(lease, event.reason, effects)
        self.groups.close(self.lent or ())
        self.lent, self.draw_pending = None, False
        self.evaluations.close()

    _handlers: ClassVar[dict[type, Callable[[Any, Any, float, list[Effect]], None]]] = {
        NodeJoined: _node_joined,
        NodeWanted: _node_wanted,
        NodeLost: _node_lost,
        ResultArrived: _result_arrived,
        ResultsArrived: _results_arrived,
        EvalRequested: _eval_requested,
        Ticked: _ticked,
        RunFinished: _run_finished,
        **attesting.HANDLERS,
        **bundled.HANDLERS,
        **drawing.HANDLERS,
        **leaving.HANDLERS,
        **restarts.HANDLERS,
    }

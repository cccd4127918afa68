"""The replay buffer as a process: one ROUTER socket, one thread, the pure rules in the middle.

Messages become events, effects become messages; everything that decides lives in `buffer.replay`. What belongs to
the service alone: who may take part (fingerprints), the fate of the run (a lost trainer ends it, a lost node does
not), and the numbers that only a clock can give (push latency).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import ClassVar

from async_rl.config import group_bytes
from async_rl.errors import AsyncRLError
from async_rl.proof import within
from async_rl.run.dial import listen
from async_rl.run.exporter import Reading
from async_rl.run.killpoints import reached
from async_rl.run.process import PoolContext, pool_main
from async_rl.version import PolicyId
from async_rl.wire.link import LinkError, PeerJoined, PeerLost, Received, Server
from async_rl.wire.messages import (
    Batch,
    Cancel,
    Checkpointed,
    Compared,
    Confirm,
    Confirmed,
    Drain,
    Draw,
    EvalRequest,
    EvalResult,
    Final,
    Finish,
    GiveBack,
    HandOver,
    Lease,
    Leases,
    Message,
    NodeDraining,
    NodeHolds,
    NodeReady,
    NodeServing,
    NodeTrouble,
    NodeWants,
    NothingFree,
    PolicyPublished,
    Results,
    Status,
    StatusRequest,
    Stop,
    TakeOver,
    TrainerReady,
)
from async_rl.wire.payloads import pack_payloads
from async_rl.wire.seen import NOTHING_SEEN, Seen
from buffer import events
from buffer.arrivals import Result, attempts_of, read_results
from buffer.attendance import Attendance
from buffer.collector import collect_young_only
from buffer.departures import Departures
from buffer.observed import Observed
from buffer.recorder import Recorder
from buffer.rules import of_shard, rules_from_config

log = logging.getLogger("buffer")

TICK_S = 0.25  # how often deadlines are looked at
POLL_S = 0.05  # the longest sleep in the socket; bounds how late a tick can be
MAX_BACKLOG = 10_000  # messages that a peer has not acknowledged, while it goes on asking
PARTING_S = 5.0  # how long the peers have to say goodbye after the end


class RunFailed(AsyncRLError):
    """The run cannot go on."""


class Service:
    """`serve()` returns when the run is over, and raises RunFailed when it failed."""

    def __init__(
        self, context: PoolContext, server: Server, recorder: Recorder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._recorder = recorder
        shift = max(0.0, recorder.now - clock())  # of a machine that was started again
        self._clock: Callable[[], float] = lambda: clock() + shift
        self._stopping, self._exporter, self._watchdog = context.stopping, context.exporter, context.watchdog
        self._replay = recorder.replay
        self._observed = Observed(context.config, self._clock())
        self._attendance = Attendance(
            context.config, self._replay, self._apply, self._send, self._disconnect, self._clock(),
            self._observed.strays,
        )  # fmt: skip
        self._recorded: dict[int, events.LendBatch] = {}  # for a trainer that has gone back
        self._largest_payload = group_bytes(context.config) // context.config.buffer.group_size
        self._results: list[Result] = []  # of this burst, not applied yet
        self._departures = Departures(
            self._attendance.say, self._send, self._attendance.ready.keys(), self._read_results
        )
        self._finished: Finish | None = None
        rules = rules_from_config(context.config, together=context.together)
        self._apply(events.BufferStarted(of_shard(rules, context.shard)))

    # --- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        next_tick = self._clock() + TICK_S
        while self._finished is None:
            self._watchdog.beat("takes what its peers send")
            if self._stopping.is_set():
                self._stop_everyone("the buffer was told to stop", "the buffer was told to stop")
                self._part()
                return
            for event in self._server.poll(POLL_S):
                self._handle(event)
            self._apply_results()
            reached("buffer.after-effects")
            if self._clock() >= next_tick:
                self._apply(events.Ticked())
                self._attendance.give_up_missing(self._clock())
                self._check_trainer()
                self._exporter.offer(self._clock(), self._reading)
                next_tick = self._clock() + TICK_S
        self._part()
        if self._finished.error:
            raise RunFailed(self._finished.error)

    def _handle(self, event: Received | PeerJoined | PeerLost) -> None:
        """Results wait for the end of the burst, but not longer than for the next event that is none."""
        if isinstance(event, Received) and isinstance(event.message, Results) and event.role == "node":
            self._on_results(event)
            return
        if isinstance(event, Received) and not isinstance(event.message, StatusRequest):
            self._observed.messages["control"] += 1
        self._apply_results()
        if isinstance(event, PeerLost):
            self._on_lost(event)
        elif isinstance(event, PeerJoined):
            self._attendance.joined(event.peer)
        else:
            handler = self._handlers.get((type(event.message), event.role))
            if handler is None or not self._may_speak(event):
                log.warning("%s sent %s, which is not for it to send", event.peer, type(event.message).__name__)
                self._observed.strays["misplaced"] += 1
            elif self._server.backlog(event.peer) > MAX_BACKLOG:
                self._observed.strays["unread_answers"] += 1
                self._disconnect(event.peer, f"it asks on and on, and has left {MAX_BACKLOG} answers unread")
            else:
                handler(self, event)

    def _on_departure(self, received: Received) -> None:
        self._departures.handle(received)

    def _may_speak(self, event: Received) -> bool:
        """One trainer drives a run: whoever else says it is one has to introduce itself first, and is refused then."""
        if event.role != "trainer" or isinstance(event.message, TrainerReady | StatusRequest):
            return True
        return event.peer == self._attendance.trainer

    def _apply(self, event: events.AnyEvent) -> None:
        """The only way into the rules; when the effects are carried out, the journal has the event."""
        self._carry_out(self._recorder.apply(event, self._clock()))

    # --- who takes part ----------------------------------------------------------------------------------------------

    def _on_node_ready(self, received: Received) -> None:
        self._attendance.node_ready(received.peer, received.message)

    def _on_trainer_ready(self, received: Received) -> None:
        self._attendance.trainer_ready(received)

    def _check_trainer(self) -> None:
        error = self._attendance.why_no_trainer(self._clock())
        if error and self._finished is None:
            self._stop_everyone(error, error)

    def _on_lost(self, lost: PeerLost) -> None:
        self._attendance.lost(lost, self._clock())
        self._observed.wants.pop(lost.peer, None)
        self._check_trainer()

    # --- what nodes say ----------------------------------------------------------------------------------------------

    def _on_serving(self, received: Received) -> None:
        message: NodeServing = received.message
        self._observed.serving(received.peer, message.policy, self._clock())
        self._attendance.say(received.peer, events.NodeAttested(received.peer, message.policy, message.proof))

    def _on_holds(self, received: Received) -> None:
        message: NodeHolds = received.message
        self._attendance.say(received.peer, events.NodeHeld(received.peer, message.policy, message.proof))

    def _on_wants(self, received: Received) -> None:
        message: NodeWants = received.message
        self._observed.wants[received.peer] = message
        self._attendance.say(received.peer, events.NodeWanted(received.peer, message.total_samples, message.once))

    def _on_trouble(self, received: Received) -> None:
        message: NodeTrouble = received.message
        self._observed.trouble += 1
        log.error("node %s could not load policy %s: %s", received.peer, message.policy.short(), message.error)
        if message.refused:
            self._attendance.say(received.peer, events.NodeRefused(received.peer, message.policy, message.error))

    def _on_results(self, received: Received) -> None:
        results = self._read_results(received)
        self._observed.messages["results"] += sum(map(attempts_of, results))
        if received.peer in self._attendance.admitted:
            self._results += results
            return
        for result in results:
            self._attendance.say(received.peer, result)

    def _read_results(self, received: Received) -> list[Result]:
        results, broken = read_results(
            received, self._largest_payload, self._replay.rules.group_size, self._replay.leases.holder
        )
        self._observed.trouble += broken
        return results

    def _apply_results(self) -> None:
        """What arrived in one burst is one event: lending and leasing are decided once for all of it."""
        if self._results:
            results, self._results = tuple(self._results), []
            self._observed.arrived(results, self._replay.leases)
            self._apply(events.ResultsArrived(results))

    # --- what the trainer says ---------------------------------------------------------------------------------------

    def _on_published(self, received: Received) -> None:
        policy: PolicyId = received.message.policy
        self._observed.published(policy, self._attendance.admitted, self._clock())
        self._apply(events.PolicyRegistered(policy, received.message.proof))

    def _on_draw(self, received: Received) -> None:
        self._apply(events.DrawRequested(received.message.for_version))

    def _on_confirm(self, received: Received) -> None:
        message: Confirm = received.message
        self._apply(events.BatchConfirmed(message.batch, message.dispositions, message.ess, message.k3))
        self._send(received.peer, Confirmed(message.batch, self._replay.progress()))

    def _on_eval(self, received: Received) -> None:
        message: EvalRequest = received.message
        asked = (message.policy, message.n, message.sampling, message.timeout_s, message.eval_set, message.samples)
        self._apply(events.EvalRequested(*asked))

    def _on_checkpointed(self, received: Received) -> None:
        self._apply(events.Checkpointed(received.message.version))

    def _on_finish(self, received: Received) -> None:
        """The account is closed either way; but the journal of a run that is not at its last step stays open, so that
        a resumed one goes on with all that is held here."""
        message: Finish = received.message
        finished = events.RunFinished(message.reason)
        if self._replay.confirmed_batches >= self._replay.rules.steps:
            self._apply(finished)
        else:
            self._carry_out(self._recorder.apply_unrecorded(finished, self._clock()))
        self._send(received.peer, Final(self.status()))
        self._stop_everyone(message.reason, message.error)

    def _on_status(self, received: Received) -> None:
        message: StatusRequest = received.message
        self._send(received.peer, self.status(message.seen))

    # --- what the rules decide ---------------------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[events.Effect]) -> None:
        grants: dict[str, list[Lease]] = defaultdict(list)
        refused: list[events.NothingFree] = []  # who is told after what there was
        for effect in effects:
            match effect:
                case events.GrantLease(node, lease):
                    grants[node].append(lease)
                case events.MoveLease(node, lease, payloads) if all(payloads):
                    inline, blobs = pack_payloads(payloads)
                    self._send(node, TakeOver(lease, inline), blobs)
                case events.MoveLease(node, lease, _):  # a restart may have cost its prefixes: it is sampled anew
                    grants[node].append(lease)
                case events.NothingFree():
                    refused.append(effect)
                case events.CancelLease(node, lease_id, reason):
                    self._send(node, Cancel((lease_id,), reason))
                case events.LendBatch():
                    self._lend(effect)
                case events.LendRecorded(batch):
                    self._lend_recorded(batch)
                case events.EvalFinished(policy, n, mean, cancelled, seconds, eval_set, rewards):
                    self._to_trainer(EvalResult(policy, n, mean, cancelled, seconds, eval_set, rewards))
                case events.ResultRefused(node, lease_id, sample, reason):
                    log.info("result %d/%d of %s refused: %s", lease_id, sample, node, reason)
                case events.QuarantineNode(node, cause):
                    log.error("node %s is quarantined: %s", node, cause)
                    self._send(node, Cancel((), f"{node} is quarantined: {cause}"))
                case events.NodePassed(policy, measure, bound):
                    far = measure.max_dlogp
                    log.info("node %s, %s %s: %s", measure.node, policy.name, policy.short(), within(far, bound))
                    self._send(measure.node, Compared(policy, far, bound))
                case events.EndRun(error):
                    self._stop_everyone(error, error)
        for node, leases in grants.items():
            self._send(node, Leases(tuple(leases)))
        for nothing in refused:
            self._send(nothing.node, NothingFree(nothing.granted))

    def _send(self, peer: str, message: Message, blobs: Sequence[bytes | memoryview] = ()) -> None:
        """To a peer that may have left since: then its PeerLost is on the way, and settles what this was about."""
        if not isinstance(message, Batch | Status):
            self._observed.messages["control"] += 1
        try:
            self._server.send(peer, message, blobs)
        except LinkError as error:
            log.info("%s", error)

    def _lend(self, lend: events.LendBatch) -> None:
        """Forward the payloads as they came."""
        inline, blobs = pack_payloads(lend.payloads)
        self._to_trainer(Batch(lend.batch, lend.for_version, lend.groups, inline), blobs)

    def _lend_recorded(self, batch: int) -> None:
        """To a trainer that has gone back, until it has caught up."""
        if batch not in self._recorded:
            with self._watchdog.working("plays the journal through"):
                self._recorded = self._recorder.recorded(batch)
        for before in [each for each in self._recorded if each < batch]:
            del self._recorded[before]
        if batch in self._recorded:
            self._lend(self._recorded[batch])
        else:
            error = f"batch {batch} was confirmed, is asked for again, and is not in the journal: begin a new run"
            self._stop_everyone(error, error)

    def _disconnect(self, peer: str, reason: str) -> None:
        try:
            self._server.disconnect(peer, reason)
        except LinkError as error:
            log.info("%s", error)

    def _to_trainer(self, message: Batch | EvalResult, blobs: Sequence[bytes | memoryview] = ()) -> None:
        if self._attendance.trainer:
            self._send(self._attendance.trainer, message, blobs)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop_everyone(self, reason: str, error: str = "") -> None:
        for peer in list(self._server.peers):
            self._send(peer, Stop(reason, error))
        if self._finished is None:
            self._finished = Finish(reason, error)

    def _part(self) -> None:
        """Stay until everyone has read the news and left, or PARTING_S is over."""
        deadline = self._clock() + PARTING_S
        while self._server.peers and self._clock() < deadline:
            for event in self._server.poll(POLL_S):
                if isinstance(event, Received) and isinstance(event.message, StatusRequest):
                    self._on_status(event)

    def status(self, seen: Seen = NOTHING_SEEN) -> Status:
        attendance = self._attendance
        return self._observed.status(self._replay, attendance.ready, attendance.trainer, self._clock(), seen)

    def _reading(self) -> Reading:
        return self._observed.reading(self._replay, self._attendance.ready, self._attendance.trainer, self._server)

    _handlers: ClassVar[dict[tuple[type, str | None], Callable[[Service, Received], None]]] = {
        (NodeReady, "node"): _on_node_ready,
        (NodeServing, "node"): _on_serving,
        (NodeHolds, "node"): _on_holds,
        (NodeWants, "node"): _on_wants,
        (NodeTrouble, "node"): _on_trouble,
        (NodeDraining, "node"): _on_departure,
        (GiveBack, "node"): _on_departure,
        (HandOver, "node"): _on_departure,
        (Drain, "tool"): _on_departure,
        (TrainerReady, "trainer"): _on_trainer_ready,
        (PolicyPublished, "trainer"): _on_published,
        (Draw, "trainer"): _on_draw,
        (Confirm, "trainer"): _on_confirm,
        (Checkpointed, "trainer"): _on_checkpointed,
        (EvalRequest, "trainer"): _on_eval,
        (Finish, "trainer"): _on_finish,
        (StatusRequest, "trainer"): _on_status,
        (StatusRequest, "tool"): _on_status,
    }


def body(context: PoolContext, kind: type[Recorder] = Recorder) -> None:
    with context.directory.alone(context.name):
        _serve(context, kind)


def _serve(context: PoolContext, kind: type[Recorder]) -> None:
    collect_young_only()
    server = listen(context, context.directory.endpoints[context.shard])
    log.info("buffer listens at %s (bound %d)", server.endpoint, context.config.buffer.max_staleness)
    with context.watchdog.working("plays the journal through"):
        recorder = open_recorder(context, kind)
    try:
        Service(context, server, recorder).serve()
    finally:
        recorder.close()
        server.close()


def open_recorder(context: PoolContext, kind: type[Recorder]) -> Recorder:
    """The run's journal, played through if there is one. Raises JournalError."""
    started, directory, config = time.monotonic(), context.directory, context.config
    rules, journal = of_shard(rules_from_config(config), context.shard), directory.shard_journal(context.shard)
    recorder = kind(journal, directory.run_id, rules, config.buffer.fsync)
    if recorder.torn:
        log.warning("cut off the journal's torn end: %s from byte %d on", recorder.torn.path, recorder.torn.offset)
    if recorder.recovered_events:
        log.info(
            "recovered from %d events of the journal in %.1f s: %d batches confirmed, %d groups held",
            recorder.recovered_events, time.monotonic() - started, recorder.replay.confirmed_batches,
            recorder.replay.ready_groups,
        )  # fmt: skip
    return recorder


if __name__ == "__main__":
    pool_main(__file__, body)

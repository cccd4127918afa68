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
from typing import Any, ClassVar

import msgspec

from async_rl.config import group_bytes
from async_rl.errors import AsyncRLError
from async_rl.fingerprint import difference, pacing
from async_rl.run.dial import listen
from async_rl.run.exporter import Reading
from async_rl.run.process import PoolContext, pool_main
from async_rl.trajectory import TrajectoryError, check_header, decode_trajectory
from async_rl.version import PolicyId
from async_rl.wire.link import LinkError, PeerJoined, PeerLost, Received, Server
from async_rl.wire.messages import (
    Batch,
    Cancel,
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
    Introduce,
    Lease,
    Leases,
    Message,
    NodeDraining,
    NodeHolds,
    NodeReady,
    NodeServing,
    NodeTrouble,
    NodeWants,
    PolicyPublished,
    Results,
    Status,
    StatusRequest,
    Stop,
    TakeOver,
    TrainerReady,
)
from async_rl.wire.payloads import pack_payloads, to_keep, unpack_payloads
from buffer import events
from buffer.collector import collect_young_only
from buffer.departures import Departures
from buffer.observed import Observed
from buffer.replay import Replay, rules_from_config

log = logging.getLogger("buffer")

TICK_S = 0.25  # how often deadlines are looked at
POLL_S = 0.05  # the longest sleep in the socket; bounds how late a tick can be
PARTING_S = 5.0  # how long the peers have to say goodbye after the end


class RunFailed(AsyncRLError):
    """The run cannot go on."""


class Service:
    """`serve()` returns when the run is over, and raises RunFailed when it failed."""

    def __init__(self, context: PoolContext, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = context.config
        self._server = server
        self._clock = clock
        self._stopping, self._exporter, self._watchdog = context.stopping, context.exporter, context.watchdog
        self._replay = Replay(rules_from_config(context.config))
        self._observed = Observed(context.config, clock())
        self._reference: dict[str, str] | None = None
        self._trainer: str | None = None
        self._trainer_lost = ""
        self._ready: dict[str, NodeReady] = {}  # what each node said it is
        self._admitted: set[str] = set()
        self._held: dict[str, list[events.AnyEvent]] = defaultdict(list)  # of nodes that wait for the trainer
        self._given_up: set[str] = set()  # nodes that fell silent, and may come back with the same session
        self._largest_payload = group_bytes(context.config) // context.config.buffer.group_size
        self._results: list[events.ResultArrived] = []  # of this burst, not applied yet
        self._departures = Departures(self._apply_for_node, self._send, self._ready.keys(), self._read_results)
        self._finished: Finish | None = None

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
            if self._clock() >= next_tick:
                self._apply(events.Ticked())
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
        self._apply_results()
        if isinstance(event, PeerLost):
            self._on_lost(event)
        elif isinstance(event, PeerJoined):
            self._on_joined(event)
        else:
            handler = self._handlers.get((type(event.message), event.role))
            if handler is None or not self._may_speak(event):
                log.warning("%s sent %s, which is not for it to send", event.peer, type(event.message).__name__)
            else:
                handler(self, event)

    def _on_departure(self, received: Received) -> None:
        self._departures.handle(received)

    def _may_speak(self, event: Received) -> bool:
        """One trainer drives a run: whoever else says it is one has to introduce itself first, and is refused then."""
        if event.role != "trainer" or isinstance(event.message, TrainerReady | StatusRequest):
            return True
        return event.peer == self._trainer

    def _apply(self, event: events.AnyEvent) -> None:
        """The only way into the rules. A journal would append `event` here, before anything is acknowledged."""
        self._carry_out(self._replay.apply(event, self._clock()))

    def _apply_for_node(self, node: str, event: events.AnyEvent) -> None:
        """Hold what a node says until the trainer's fingerprint has admitted it."""
        if node in self._admitted:
            self._apply(event)
        else:
            self._held[node].append(event)

    # --- who takes part ----------------------------------------------------------------------------------------------

    def _on_node_ready(self, received: Received) -> None:
        """A node introduces itself: whatever it said before, it said as somebody else."""
        self._held.pop(received.peer, None)
        self._ready[received.peer] = received.message
        if self._reference is None:
            log.info("node %s waits in joining: the trainer is not here yet", received.peer)
        else:
            self._admit(received.peer)

    def _admit(self, node: str) -> None:
        ready = self._ready[node]
        differs = difference(self._reference or {}, ready.fingerprint)
        if differs:
            log.error("node %s refused: its set-up is not the trainer's: %s", node, differs)
            self._disconnect(node, f"its set-up is not the trainer's: {differs}")
            self._forget(node)
            return
        log.info("node %s joins (%s, %d slots)", node, ready.engine, ready.slots)
        self._admitted.add(node)
        self._apply(events.NodeJoined(node, ready.slots, ready.logprob_bound))
        for event in self._held.pop(node, []):
            self._apply(event)

    def _on_trainer_ready(self, received: Received) -> None:
        if self._trainer is not None and self._trainer != received.peer:
            self._disconnect(received.peer, f"this run has a trainer already: {self._trainer}")
            return
        if self._trainer is not None:
            error = f"a second trainer named {self._trainer} took the place of the first: go on with --resume"
            self._stop_everyone(error, error)
            return
        message: TrainerReady = received.message
        differs = difference(pacing(self._config), message.pacing, "the buffer")
        if differs:
            log.error("trainer %s refused: %s", received.peer, differs)
            self._disconnect(received.peer, f"its config is not the buffer's: {differs}")
            return
        self._trainer, self._reference = received.peer, message.fingerprint
        log.info("trainer %s is here", received.peer)
        if message.progress is not None:
            self._apply(events.Resumed(message.progress))
        for node in list(self._ready):
            self._admit(node)

    def _on_joined(self, joined: PeerJoined) -> None:
        if joined.peer in self._given_up:
            self._given_up.discard(joined.peer)
            self._send(joined.peer, Introduce("it was silent for too long, and its leases were given to others"))

    def _on_lost(self, lost: PeerLost) -> None:
        """A silent node loses its leases at once; a silent trainer has until the link gives its session up."""
        log.warning("%s %s is gone: %s", lost.role, lost.peer, lost.reason)
        if lost.role == "node":
            if lost.peer in self._admitted:
                self._apply(events.NodeLost(lost.peer, lost.reason))
            self._forget(lost.peer)
            if lost.peer in self._server.peers:  # it said no goodbye: its session may resume
                self._given_up.add(lost.peer)
        elif lost.peer == self._trainer:
            self._trainer_lost = lost.reason
            self._check_trainer()

    def _check_trainer(self) -> None:
        if self._trainer is not None and self._trainer not in self._server.peers and self._finished is None:
            error = f"the trainer {self._trainer} is gone: {self._trainer_lost}"
            self._stop_everyone(error, error)

    def _forget(self, node: str) -> None:
        self._admitted.discard(node)
        for table in (self._ready, self._held, self._observed.wants):
            table.pop(node, None)

    # --- what nodes say ----------------------------------------------------------------------------------------------

    def _on_serving(self, received: Received) -> None:
        message: NodeServing = received.message
        self._observed.serving(received.peer, message.policy, self._clock())
        self._apply_for_node(received.peer, events.NodeAttested(received.peer, message.policy, message.proof))

    def _on_holds(self, received: Received) -> None:
        message: NodeHolds = received.message
        self._apply_for_node(received.peer, events.NodeHeld(received.peer, message.policy, message.proof))

    def _on_wants(self, received: Received) -> None:
        self._observed.wants[received.peer] = received.message
        self._apply_for_node(received.peer, events.NodeWanted(received.peer, received.message.total_samples))

    def _on_trouble(self, received: Received) -> None:
        message: NodeTrouble = received.message
        self._observed.trouble += 1
        log.error("node %s could not load policy %s: %s", received.peer, message.policy.short(), message.error)
        if message.refused:
            self._apply_for_node(received.peer, events.NodeRefused(received.peer, message.policy, message.error))

    def _on_results(self, received: Received) -> None:
        results: list[Any] = self._results if received.peer in self._admitted else self._held[received.peer]
        results += self._read_results(received)

    def _read_results(self, received: Received) -> list[events.ResultArrived]:
        """The encoded trajectories of a message, as far as they can be read."""
        message: Results | HandOver = received.message
        encoded = message.trajectories if isinstance(message, Results) else message.prefixes
        try:
            payloads = unpack_payloads(encoded, received.blobs)
        except ValueError as error:
            log.error("what node %s sampled cannot be read: %s", received.peer, error)
            self._observed.trouble += 1
            return []
        results = [self._result_event(received.peer, payload) for payload in to_keep(payloads)]
        return [result for result in results if result is not None]

    def _result_event(self, node: str, payload: bytes | memoryview) -> events.ResultArrived | None:
        """Read the head of a trajectory, not its arrays. What cannot be read names no attempt: it is counted."""
        try:
            trajectory = decode_trajectory(payload)
        except msgspec.MsgspecError as error:
            log.error("node %s sent a trajectory that cannot be decoded: %s", node, error)
            self._observed.trouble += 1
            return None
        problem = ""
        try:
            check_header(trajectory)
            if len(payload) > self._largest_payload:
                problem = f"{len(payload)} bytes, more than the {self._largest_payload} that were reserved for it"
        except TrajectoryError as error:
            problem = str(error)
        of = trajectory
        return events.ResultArrived(
            node, of.lease, of.sample, of.status, of.reward, of.versions, of.n_tokens, payload, problem
        )

    def _apply_results(self) -> None:
        """What arrived in one burst is one event: lending and leasing are decided once for all of it."""
        if self._results:
            results, self._results = tuple(self._results), []
            self._apply(events.ResultsArrived(results))

    # --- what the trainer says ---------------------------------------------------------------------------------------

    def _on_published(self, received: Received) -> None:
        policy: PolicyId = received.message.policy
        self._observed.published(policy, self._admitted, self._clock())
        self._apply(events.PolicyRegistered(policy, received.message.proof))

    def _on_draw(self, received: Received) -> None:
        self._apply(events.DrawRequested(received.message.for_version))

    def _on_confirm(self, received: Received) -> None:
        message: Confirm = received.message
        self._apply(events.BatchConfirmed(message.batch, message.dispositions))
        self._send(received.peer, Confirmed(message.batch, self._replay.progress()))

    def _on_eval(self, received: Received) -> None:
        message: EvalRequest = received.message
        self._apply(events.EvalRequested(message.policy, message.n, message.sampling, message.timeout_s))

    def _on_finish(self, received: Received) -> None:
        message: Finish = received.message
        self._apply(events.RunFinished(message.reason))
        self._send(received.peer, Final(self.status()))
        self._stop_everyone(message.reason, message.error)

    def _on_status(self, received: Received) -> None:
        self._send(received.peer, self.status())

    # --- what the rules decide ---------------------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[events.Effect]) -> None:
        grants: dict[str, list[Lease]] = defaultdict(list)
        for effect in effects:
            match effect:
                case events.GrantLease(node, lease):
                    grants[node].append(lease)
                case events.MoveLease(node, lease, payloads):
                    inline, blobs = pack_payloads(payloads)
                    self._send(node, TakeOver(lease, inline), blobs)
                case events.CancelLease(node, lease_id, reason):
                    self._send(node, Cancel((lease_id,), reason))
                case events.LendBatch():
                    self._lend(effect)
                case events.EvalFinished(policy, n, mean, cancelled, seconds):
                    self._to_trainer(EvalResult(policy, n, mean, cancelled, seconds))
                case events.ResultRefused(node, lease_id, sample, reason):
                    log.info("result %d/%d of %s refused: %s", lease_id, sample, node, reason)
                case events.QuarantineNode(node, cause):
                    log.error("node %s is quarantined: %s", node, cause)
                    self._send(node, Cancel((), f"{node} is quarantined: {cause}"))
                case events.EndRun(error):
                    self._stop_everyone(error, error)
        for node, leases in grants.items():
            self._send(node, Leases(tuple(leases)))

    def _send(self, peer: str, message: Message, blobs: Sequence[bytes | memoryview] = ()) -> None:
        """To a peer that may have left since: then its PeerLost is on the way, and settles what this was about."""
        try:
            self._server.send(peer, message, blobs)
        except LinkError as error:
            log.info("%s", error)

    def _lend(self, lend: events.LendBatch) -> None:
        """Forward the payloads as they came."""
        inline, blobs = pack_payloads(lend.payloads)
        self._to_trainer(Batch(lend.batch, lend.for_version, lend.groups, inline), blobs)

    def _disconnect(self, peer: str, reason: str) -> None:
        try:
            self._server.disconnect(peer, reason)
        except LinkError as error:
            log.info("%s", error)

    def _to_trainer(self, message: Batch | EvalResult, blobs: Sequence[bytes | memoryview] = ()) -> None:
        if self._trainer is not None:
            self._send(self._trainer, message, blobs)

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

    def status(self) -> Status:
        return self._observed.status(self._replay, self._ready, self._trainer or "", self._clock())

    def _reading(self) -> Reading:
        return self._observed.reading(self._replay, self._ready, self._trainer or "", self._server)

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
        (EvalRequest, "trainer"): _on_eval,
        (Finish, "trainer"): _on_finish,
        (StatusRequest, "trainer"): _on_status,
        (StatusRequest, "tool"): _on_status,
    }


def body(context: PoolContext) -> None:
    collect_young_only()
    server = listen(context, context.directory.endpoint)
    log.info("buffer listens at %s (bound %d)", server.endpoint, context.config.buffer.max_staleness)
    try:
        Service(context, server).serve()
    finally:
        server.close()


if __name__ == "__main__":
    pool_main(__file__, body)

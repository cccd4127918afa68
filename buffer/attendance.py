"""Who takes part in the run: nodes and the trainer, as they come, fall silent, and come back.

A process is known by its `life`. One that comes back with the life that the rules know goes on where it was, and the
two sides compare what it holds; any other begins anew. What a node says before the trainer's fingerprint has admitted
it is held. Nothing here decides about attempts: that is for the rules, who hear of it all as events.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from async_rl.config import Config
from async_rl.fingerprint import difference, pacing
from async_rl.wire.link import PeerLost, Received
from async_rl.wire.messages import Cancel, Introduce, Leases, Message, NodeReady, TrainerReady
from buffer import events
from buffer.replay import Replay
from buffer.restarts import open_leases

log = logging.getLogger("buffer")

MAX_HELD = 256  # things that one node may say before the trainer is here
RETURN_HEARTBEATS = 6  # how long nodes of before have to come back to a buffer that was started again


class Missing(NamedTuple):
    """The trainer is not here: since when, why, and whether it has said goodbye."""

    since: float
    reason: str
    left: bool


class Attendance:
    """`apply`, `send` and `disconnect` are the service's; times are on its clock. `strays` counts what was said before
    the trainer came, beyond MAX_HELD of one node, and not heard."""

    def __init__(
        self,
        config: Config,
        replay: Replay,
        apply: Callable[[events.AnyEvent], None],
        send: Callable[[str, Message], None],
        disconnect: Callable[[str, str], None],
        now: float,
        strays: Counter[str],
    ) -> None:
        self._config = config
        self._replay = replay
        self._apply, self._send, self._disconnect = apply, send, disconnect
        self.ready: dict[str, NodeReady] = {}
        """What each node that is here said it is."""
        self._held: dict[str, list[events.AnyEvent]] = defaultdict(list)  # of nodes that wait for the trainer
        self._strays = strays
        self._given_up: set[str] = set()  # nodes that fell silent, and may come back with the same session
        known = {view.name for view in replay.nodes.views() if view.state != "gone"}
        self._admitted: set[str] = set(known)
        self._awaited = dict.fromkeys(known, now + RETURN_HEARTBEATS * config.buffer.heartbeat)
        self._trainer_missing: Missing | None = None
        if replay.trainer is not None:
            self._trainer_missing = Missing(now, "it has not come back since the buffer was started again", left=False)

    @property
    def trainer(self) -> str:
        """The one trainer that drives the run; empty when none has come yet."""
        return self._replay.trainer.trainer if self._replay.trainer else ""

    @property
    def admitted(self) -> set[str]:
        return self._admitted

    def say(self, node: str, event: events.AnyEvent) -> None:
        """What a node says, held until the trainer's fingerprint has admitted it."""
        if node in self._admitted:
            self._apply(event)
        elif len(self._held[node]) < MAX_HELD:
            self._held[node].append(event)
        else:
            self._strays["too_early"] += 1

    # --- nodes -------------------------------------------------------------------------------------------------------

    def node_ready(self, node: str, ready: NodeReady) -> None:
        self.ready[node] = ready
        self._awaited.pop(node, None)
        if self._goes_on(node, ready):
            self._compare(node, ready)
            return
        self._held.pop(node, None)  # whatever it said before, it said as somebody else
        if self._replay.trainer is None:
            log.info("node %s waits in joining: the trainer is not here yet", node)
        else:
            self._admit(node)

    def _goes_on(self, node: str, ready: NodeReady) -> bool:
        known = self._replay.nodes.get(node)
        return known is not None and node in self._admitted and bool(ready.life) and known.life == ready.life

    def _compare(self, node: str, ready: NodeReady) -> None:
        """Send what it should have and has not, and cancel what it has and should not."""
        owed = open_leases(self._replay, node)
        missed = tuple(lease for lease in owed if lease.lease not in ready.holds)
        log.info("node %s goes on with %d leases (%d sent again)", node, len(owed), len(missed))
        if missed:
            self._send(node, Leases(missed))
        self._cancel_foreign(node, ready, {lease.lease for lease in owed})

    def _cancel_foreign(self, node: str, ready: NodeReady, owed: set[int]) -> None:
        foreign = tuple(number for number in ready.holds if number not in owed)
        if foreign:
            self._send(node, Cancel(foreign, "given to others meanwhile, or delivered"))

    def _admit(self, node: str) -> None:
        ready = self.ready[node]
        reference = self._replay.trainer.fingerprint if self._replay.trainer else {}
        differs = difference(reference, ready.fingerprint)
        if differs:
            log.error("node %s refused: its set-up is not the trainer's: %s", node, differs)
            self._disconnect(node, f"its set-up is not the trainer's: {differs}")
            self.forget(node)
            return
        log.info("node %s joins (%s, %d slots)", node, ready.engine, ready.slots)
        self._admitted.add(node)
        self._apply(events.NodeJoined(node, ready.slots, ready.logprob_bound, ready.life, ready.granted))
        self._cancel_foreign(node, ready, set())
        for event in self._held.pop(node, []):
            self._apply(event)

    def joined(self, peer: str) -> None:
        """A peer is connected (again)."""
        if peer in self._given_up:
            self._given_up.discard(peer)
            self._send(peer, Introduce("it was silent for too long, and its leases were given to others"))
        if peer == self.trainer:
            self._trainer_missing = None

    def lost(self, lost: PeerLost, now: float) -> None:
        """A silent node loses its leases at once; a silent trainer has a while to come back."""
        log.warning("%s %s is gone: %s", lost.role, lost.peer, lost.reason)
        if lost.role == "node":
            self._give_up(lost.peer, lost.reason)
            if not lost.left:
                self._given_up.add(lost.peer)
        elif lost.peer == self.trainer:
            self._trainer_missing = Missing(now, lost.reason, lost.left)

    def _give_up(self, node: str, reason: str) -> None:
        if node in self._admitted:
            self._apply(events.NodeLost(node, reason))
        self.forget(node)

    def give_up_missing(self, now: float) -> None:
        """Nodes of before the buffer was started again that have not come back."""
        for node in [node for node, deadline in self._awaited.items() if now >= deadline]:
            log.warning("node %s has not come back since the buffer was started again", node)
            self._give_up(node, "it has not come back since the buffer was started again")

    def forget(self, node: str) -> None:
        self._admitted.discard(node)
        for table in (self.ready, self._held, self._awaited):
            table.pop(node, None)

    # --- the trainer -------------------------------------------------------------------------------------------------

    def trainer_ready(self, received: Received) -> None:
        """Refuse it, or let it drive the run. One that is started again, under the name of
        the first or when that is missing, takes its place."""
        message: TrainerReady = received.message
        present = self._replay.trainer
        if present is not None and present.trainer != received.peer and self._trainer_missing is None:
            self._disconnect(received.peer, f"this run has a trainer already: {present.trainer}")
            return
        reference = message.fingerprint if present is None else present.fingerprint
        differs = difference(pacing(self._config), message.pacing, "the buffer") or difference(
            reference, message.fingerprint, "the journal"
        )
        if differs:
            log.error("trainer %s refused: %s", received.peer, differs)
            self._disconnect(received.peer, f"its config is not the buffer's: {differs}")
            return
        self._trainer_missing = None
        if present is None or (present.trainer, present.life) != (received.peer, message.life) or not message.life:
            self._trainer_comes(received.peer, message)
        for node in list(self.ready):
            if node not in self._admitted:
                self._admit(node)

    def _trainer_comes(self, name: str, message: TrainerReady) -> None:
        replay = self._replay
        log.info("trainer %s is here, at version %d", name, message.version)
        if message.progress is not None and replay.trainer is None:
            self._apply(events.Resumed(message.progress))
        self._apply(events.TrainerJoined(name, message.life, message.fingerprint, message.version))

    def why_no_trainer(self, now: float) -> str:
        """Why the run must end for want of a trainer; empty while there is one, or it may come back: one that has said
        goodbye does not."""
        missing = self._trainer_missing
        if missing is None:
            return ""
        if missing.left:
            return f"the trainer {self.trainer} is gone: {missing.reason}"
        silent = now - missing.since
        if silent < self._config.buffer.trainer_timeout:
            return ""
        return f"the trainer {self.trainer} is gone for {silent:.0f} s: {missing.reason}"

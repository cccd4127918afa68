"""What the service hears of nodes that leave, and says to them: messages into events, no more (rules: buffer.leaving).

tool  -- Drain --> buffer -- Drain --> node          or the node was told by a signal
node  -- NodeDraining, GiveBack, ..., GiveBack, HandOver --> buffer -- TakeOver --> another node
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from async_rl.wire.link import Received
from async_rl.wire.messages import Drain, DrainAnswer, GiveBack, HandOver, Message, NodeDraining
from buffer import events

log = logging.getLogger("buffer")


class Departures:
    """`apply(node, event)` is the way into the rules, `send(peer, message)` to a peer; `present` are the nodes that
    have introduced themselves; `read` turns a message's encoded trajectories into results that may have problems."""

    def __init__(
        self,
        apply: Callable[[str, events.AnyEvent], None],
        send: Callable[[str, Message], None],
        present: Collection[str],
        read: Callable[[Received], Sequence[events.ResultArrived | events.BundleArrived]],
    ) -> None:
        self._apply = apply
        self._send = send
        self._present = present
        self._read = read

    def handle(self, received: Received) -> None:
        match received.message:
            case Drain():
                self._on_drain(received)
            case NodeDraining(grace_s):
                log.info("node %s leaves, within %.1f s", received.peer, grace_s)
                self._apply(received.peer, events.NodeDraining(received.peer))
            case GiveBack(leases):
                for item in leases:
                    self._apply(received.peer, events.SamplesReturned(received.peer, item.lease, item.samples))
            case HandOver():
                self._on_hand_over(received)

    def _on_drain(self, received: Received) -> None:
        """From a tool. Nothing is leased to the node from now on, whenever it reads this."""
        drain: Drain = received.message
        if drain.node not in self._present:
            known = ", ".join(sorted(self._present)) or "none"
            self._send(received.peer, DrainAnswer(drain.node, f"there is no node {drain.node!r} (there: {known})"))
            return
        log.info("node %s is told to leave", drain.node)
        self._apply(drain.node, events.NodeDraining(drain.node))
        self._send(drain.node, drain)
        self._send(received.peer, DrainAnswer(drain.node))

    def _on_hand_over(self, received: Received) -> None:
        leases: dict[int, list[events.HandedPrefix]] = defaultdict(list)
        for result in self._read(received):
            if isinstance(result, events.BundleArrived):
                continue  # none is read in a hand-over
            prefix = events.HandedPrefix(result.sample, result.versions, result.payload, result.problem)
            leases[result.lease].append(prefix)
        for lease, prefixes in leases.items():
            self._apply(received.peer, events.PrefixesHandedOver(received.peer, lease, tuple(prefixes)))

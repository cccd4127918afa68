"""A node that leaves: what becomes of what it holds.

    NodeDraining        nothing is leased to it any more
    SamplesReturned     what it has not begun: leased again as it was
    PrefixesHandedOver  what it has begun: the lease waits for another holder (buffer.handover) and is moved to one
    NodeLost            the rest, if it went without a word: leased again

These handlers belong to `buffer.replay.Replay`, and change its state as its own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from buffer.events import Effect, MoveLease, NodeDraining, PrefixesHandedOver, SamplesReturned
from buffer.handover import sound_prefixes
from buffer.leases import LeaseRecord
from buffer.ledger import mask_of
from buffer.nodes import Node

if TYPE_CHECKING:
    from buffer.replay import Replay


def node_draining(replay: Replay, event: NodeDraining, now: float, effects: list[Effect]) -> None:
    node = replay.known(event.node)
    if node is not None:
        _drain(replay, node)


def _drain(replay: Replay, node: Node) -> None:
    replay.nodes.drains(node)
    replay.evaluations.withdraw(node)


def samples_returned(replay: Replay, event: SamplesReturned, now: float, effects: list[Effect]) -> None:
    lease = _held_by(replay, event.node, event.lease)
    if lease is not None:
        replay.take_back(lease, "cancelled", mask_of(set(lease.samples).intersection(event.samples)))


def prefixes_handed_over(replay: Replay, event: PrefixesHandedOver, now: float, effects: list[Effect]) -> None:
    """The lease waits for another holder; what of it cannot be gone on with is leased again."""
    lease = _held_by(replay, event.node, event.lease)
    if lease is not None:
        _drain(replay, lease.holder)  # whether it has said so or not: a lease must not come back to it
        prefixes = sound_prefixes(event, lease, replay.handovers)
        replay.take_back(lease, "cancelled", lease.leased & ~mask_of(prefixes))
        if prefixes:
            change_holder(lease, replay.handovers.park(lease, prefixes))


def move_leases(replay: Replay, effects: list[Effect]) -> None:
    """Leases that were handed over go to the nodes that may have them."""
    for lease, payloads, node in replay.handovers.placed(list(replay.nodes.ready())):
        change_holder(lease, node)
        samples = lease.samples
        replay.nodes.granted(node, len(samples))
        message = replay.message_of(lease, replay.groups.by_ticket[lease.ticket], samples)
        effects.append(MoveLease(node.name, message, payloads))


def change_holder(lease: LeaseRecord, node: Node) -> None:
    count = lease.leased.bit_count()
    lease.holder.leases.remove(lease.lease)
    lease.holder.leased_samples -= count
    lease.holder = node
    node.leases.add(lease.lease)
    node.leased_samples += count


def _held_by(replay: Replay, node: str, number: int) -> LeaseRecord | None:
    """An open lease, if it is this node's; counted outside otherwise."""
    lease = replay.leases.find(number)
    if lease is not None and lease.node == node:
        return lease
    replay.outside_counts["late" if replay.leases.was_issued(number) else "unknown_attempt"] += 1
    return None


HANDLERS: Mapping[type, Callable[[Any, Any, float, list[Effect]], None]] = {
    NodeDraining: node_draining,
    SamplesReturned: samples_returned,
    PrefixesHandedOver: prefixes_handed_over,
}

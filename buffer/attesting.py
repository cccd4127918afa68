"""A node says what its engine serves and holds: it may work under that, or is set aside (buffer.quarantine).

These handlers belong to `buffer.replay.Replay`, and change its state as its own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from buffer.events import Effect, NodeAttested, NodeHeld, NodeRefused, QuarantineNode
from buffer.nodes import Node

if TYPE_CHECKING:
    from buffer.replay import Replay


def node_attested(replay: Replay, event: NodeAttested, now: float, effects: list[Effect]) -> None:
    node = replay.known(event.node)
    if node is None:
        return
    if event.policy.digest not in replay.published.get(event.policy.version, ()):
        replay.outside_counts["unregistered_policy"] += 1
        return
    _set_aside(replay, node, replay.quarantine.attested(node, event.policy, event.proof), effects)
    replay.evaluations.offer(node)


def node_showed(replay: Replay, event: NodeHeld | NodeRefused, now: float, effects: list[Effect]) -> None:
    node = replay.known(event.node)
    if node is not None:
        _set_aside(replay, node, replay.quarantine.showed(node, event), effects)


def _set_aside(replay: Replay, node: Node, cause: str, effects: list[Effect]) -> None:
    """A node was quarantined, if there is a cause: what it was leased is leased again."""
    if cause:
        replay.evaluations.withdraw(node)
        for lease in sorted(node.leases):
            replay.cancel(lease, "the node is quarantined", effects)
        effects.append(QuarantineNode(node.name, cause))


HANDLERS: Mapping[type, Callable[[Any, Any, float, list[Effect]], None]] = {
    NodeAttested: node_attested,
    NodeHeld: node_showed,
    NodeRefused: node_showed,
}

"""A node says what its engine serves and holds: it may work under that, or is set aside (buffer.quarantine).

These handlers belong to `buffer.replay.Replay`, and change its state as its own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from buffer.events import Effect, NodeAttested, NodeHeld, NodePassed, NodeRefused, QuarantineNode
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
    before = node.first
    cause = replay.quarantine.attested(node, event.policy, event.proof)
    if cause:
        _set_aside(replay, node, cause, effects)
    elif before is None and node.first is not None:
        effects.append(NodePassed(event.policy, node.first, node.view().bound))
    replay.evaluations.offer(node)


def node_showed(replay: Replay, event: NodeHeld | NodeRefused, now: float, effects: list[Effect]) -> None:
    node = replay.known(event.node)
    if node is not None:
        before = node.canary
        cause = replay.quarantine.showed(node, event)
        if cause:
            _set_aside(replay, node, cause, effects)
        elif node.canary is not before and node.canary is not None:
            effects.append(NodePassed(event.policy, node.canary, node.view().bound))


def _set_aside(replay: Replay, node: Node, cause: str, effects: list[Effect]) -> None:
    """A node was quarantined: what it was leased is leased again."""
    replay.evaluations.withdraw(node)
    for lease in sorted(node.leases):
        replay.cancel(lease, "the node is quarantined", effects)
    effects.append(QuarantineNode(node.name, cause))


HANDLERS: Mapping[type, Callable[[Any, Any, float, list[Effect]], None]] = {
    NodeAttested: node_attested,
    NodeHeld: node_showed,
    NodeRefused: node_showed,
}

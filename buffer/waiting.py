"""Who waits for whom, in one sentence: what a display shows, and what a time-out is reported with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer.admission import least_version

if TYPE_CHECKING:
    from buffer.replay import Replay


def who_waits(replay: Replay, now: float) -> str:
    """O(open leases): for people, not for the rules."""
    if replay.ended:
        return f"nobody waits: {replay.ended}"
    if replay.draw_pending:
        return f"the trainer waits for {_ticket(replay, replay.groups.order.oldest_unsettled())}"
    current = replay.evaluations.current
    if current is not None:
        return (
            f"the evaluation of {current.policy.short()} on {current.eval_set} waits for {current.n - current.closed} "
            f"of {current.n} samples ({len(current.leases)} leased, {max(0.0, current.deadline - now):.0f} s left)"
        )
    verb = "draw" if replay.lent is None else "confirm"
    return f"{_nodes(replay)} the trainer to {verb} batch {replay.confirmed_batches}"


def _ticket(replay: Replay, ticket: int) -> str:
    """The ticket that holds up the batch, and why it does."""
    group, name = replay.groups.by_ticket.get(ticket), replay.rules.ticket(ticket)
    if group is not None and group.out:
        holders = sorted({lease.node for lease in replay.leases.open.values() if lease.ticket == ticket})
        size = replay.rules.group_size
        return f"ticket {name} (leased to {', '.join(holders)}, {group.good} of {size} samples)"
    ready = list(replay.nodes.ready())
    if not ready:
        return f"ticket {name} (not leased: no node is ready, {_states(replay)})"
    need = least_version(ticket, replay.lead, replay.rules.fresh_groups)
    able = [node for node in ready if node.version >= need]
    if not able:
        newest = max(node.version for node in ready)
        return f"ticket {name} (not leased: it needs a node at version {need}, the newest node is at {newest})"
    return f"ticket {name} (not leased: none of {len(able)} nodes at version {need} or newer asks for work)"


def _nodes(replay: Replay) -> str:
    """The subject of the sentence when it is the trainer's turn."""
    if replay.nodes.newest_waiting() is None:
        return "the buffer waits for"
    ticket = replay.groups.queue.lowest()
    if ticket is not None and not replay.groups.has_credit(ticket):
        return f"nodes wait for room in the buffer ({replay.ready_groups} groups ready), and so for"
    return "nodes wait for tickets, and so for"


def _states(replay: Replay) -> str:
    views = replay.nodes.views()
    if not views:
        return "none has joined"
    states = sorted({view.state for view in views})
    return ", ".join(f"{sum(view.state == state for view in views)} {state}" for state in states)

"""What the trainer asks and says: policies are known, batches are lent, and confirmed for good.

These handlers belong to `buffer.replay.Replay`, and change its state as its own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from async_rl.proof import CANARY
from async_rl.wire.messages import BatchGroup
from buffer import restarts
from buffer.adaptive import Report, next_bound
from buffer.events import BatchConfirmed, DrawRequested, Effect, LendBatch, LendRecorded, PolicyRegistered
from buffer.quarantine import KEPT
from buffer.results import remember, sort_dispositions

if TYPE_CHECKING:
    from buffer.groups import Group
    from buffer.leases import Held
    from buffer.replay import Replay


def policy_registered(replay: Replay, event: PolicyRegistered, now: float, effects: list[Effect]) -> None:
    replay.quarantine.proofs.registered(event.policy, event.proof)
    if event.policy.name != CANARY:
        if replay.rules.deterministic and (problem := restarts.why_not_the_same(replay.published, event.policy)):
            replay.end(problem, effects)
        remember(replay.published, event.policy, replay.rules.max_staleness + KEPT)
        replay.nodes.policy_registered()


def draw_requested(replay: Replay, event: DrawRequested, now: float, effects: list[Effect]) -> None:
    if replay.covered <= event.for_version < replay.confirmed_batches:
        effects.append(LendRecorded(event.for_version))
    elif event.for_version != replay.confirmed_batches:
        replay.end(
            f"the trainer draws for version {event.for_version}, but {replay.confirmed_batches} batches are "
            "confirmed: trainer and buffer are not in the same run",
            effects,
        )
    elif event.for_version >= replay.rules.steps:
        replay.end(f"the trainer draws for version {event.for_version}, beyond the run's last step", effects)
    else:
        replay.draw_pending = True


def lend(replay: Replay, now: float, effects: list[Effect]) -> None:
    """Serve the remembered draw: the batch lent already, unchanged, else the next one when it is complete."""
    if replay.lent is None:
        replay.lent = replay.groups.draw(replay.confirmed_batches)
    if replay.lent is not None:
        replay.draw_pending = False
        held = [group.held for group in replay.lent]
        payloads = tuple([each.payload for own in held for each in own])
        uses, ticket = replay.groups.pool.uses, replay.rules.ticket
        pairs = zip(replay.lent, held, strict=True)
        lent = tuple([batch_group(ticket(group.ticket), group, own, now, uses(group.ticket)) for group, own in pairs])
        effects.append(LendBatch(replay.confirmed_batches, replay.confirmed_batches, lent, payloads))


def batch_confirmed(replay: Replay, event: BatchConfirmed, now: float, effects: list[Effect]) -> None:
    if event.batch < replay.confirmed_batches:
        replay.outside_counts["repeated_confirm"] += 1
        return
    if replay.lent is None or event.batch != replay.confirmed_batches:
        lent = "none is lent" if replay.lent is None else f"batch {replay.confirmed_batches} is lent"
        replay.end(f"the trainer confirms batch {event.batch}, but {lent}", effects)
        return
    problem, outcomes = sort_dispositions(event.dispositions, replay.groups.lent_attempts(replay.lent))
    if problem:
        replay.end(f"the trainer confirms batch {event.batch}, but {problem}", effects)
        return
    rules = replay.rules
    replay.groups.confirm(replay.lent, outcomes, replay.confirmed_batches + 1)
    replay.lent = None
    replay.confirmed_batches += 1
    if rules.adaptive:
        replay.bound = next_bound(replay.bound, Report(event.ess, event.k3), rules)
    replay.groups.sweep(replay.confirmed_batches)


def batch_group(ticket: int, group: Group, held: Sequence[Held], now: float, uses: int) -> BatchGroup:
    """How a group that is lent at `now` with these attempts, for the (uses + 1)-th time, is named to the trainer, by
    the run's number of its ticket."""
    arrived: list[int] = []
    held_s: list[float] = []
    for each in held:
        count = each.samples.bit_count()
        arrived += [each.arrived] * count
        held_s += [now - each.since] * count
    return BatchGroup(
        ticket, group.try_, group.instance, len(arrived), tuple(arrived), tuple(held_s), now - group.leased_at, uses
    )


HANDLERS: Mapping[type, Callable[[Any, Any, float, list[Effect]], None]] = {
    PolicyRegistered: policy_registered,
    DrawRequested: draw_requested,
    BatchConfirmed: batch_confirmed,
}

"""A process of the run that is started again: what may follow on what.

    BufferStarted   the first event of each life of the service, by its present rules
    TrainerJoined   a trainer at version 0, or at its checkpoint's: what was lent since is lent to it again
    Resumed         the journal is lost: what a checkpoint says of it takes its place
    Checkpointed    from here on nobody goes back beyond that version

These handlers belong to `buffer.replay.Replay`, and change its state as its own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from async_rl.version import PolicyId
from async_rl.wire.messages import Lease
from buffer.events import BufferStarted, Checkpointed, Effect, Resumed, TrainerJoined
from buffer.leases import EvalLease, LeaseRecord
from buffer.results import Policies
from buffer.rules import Rules

if TYPE_CHECKING:
    from buffer.replay import Replay

FIXED = (
    "run_seed", "groups_per_step", "group_size", "max_staleness", "lead", "window", "sampling", "deterministic",
    "newest_first", "reuse", "sources", "shards", "shard",
)  # fmt: skip
"""Rules that tickets which exist already were made by."""


def why_not_adopted(old: Rules, new: Rules) -> str:
    """Why a buffer that has worked by `old` rules cannot go on by the `new` ones; empty when it can."""
    if old.shards != new.shards:
        return (
            f"the journal is of one of {old.shards} shards, and buffer.shards is {new.shards}: each has tickets of its "
            f"own, which others cannot take up: resume with buffer.shards = {old.shards}, or begin a new run"
        )
    differ = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    values = "; ".join(f"{name} was {getattr(old, name)}, and is {getattr(new, name)}" for name in differ)
    if old.instances and new.instances and old.instances != new.instances:
        values += "; " * bool(values) + (
            f"the task had {old.instances} training instances, and has {new.instances}: the history behind "
            "buffer.retire_above and buffer.difficulty is of the old ones (one start with both off lets it begin anew)"
        )
    if not values:
        return ""
    return f"the journal was written by other rules: {values}: resume with the old ones, or begin a new run"


def why_no_such_trainer(version: int, confirmed: int, covered: int) -> str:
    """Why a trainer that goes on from `version` cannot be served; empty when it can. The journal has every batch from
    the newest checkpoint that the trainer spoke of (`covered`) to the last one confirmed."""
    if version > confirmed:
        return (
            f"the trainer goes on from version {version}, but the buffer's journal ends after {confirmed} batches: it "
            "belongs to an older state of this run, or was cut"
        )
    if version < covered:
        return (
            f"the trainer goes on from version {version}, but a checkpoint of version {covered} has been written, and "
            "the batches before it are gone: resume from that one"
        )
    return ""


def why_not_the_same(published: Policies, policy: PolicyId) -> str:
    """Why a deterministic run cannot go on with a policy that is published: its version was another one before. Empty
    when it can."""
    others = [PolicyId(policy.name, policy.version, digest) for digest in published.get(policy.version, ())]
    if not others or policy in others:
        return ""
    return (
        f"version {policy.version} was {others[0].short()}, and trained again from the same batches it is "
        f"{policy.short()}: this is not the machine, or not the software or the number of threads, that trained it "
        "first, so the run cannot go on with run.deterministic = true"
    )


def resumed(replay: Replay, event: Resumed, now: float, effects: list[Effect]) -> None:
    progress, rules = event.progress, replay.rules
    spent = progress.next_ticket - len(progress.open_tickets)
    if replay.leases.granted or replay.confirmed_batches:
        replay.end("a checkpoint is resumed into a buffer that is in use: start the buffer anew", effects)
    elif spent != progress.confirmed_batches * rules.fresh_groups:
        replay.end(
            f"the checkpoint has {spent} spent tickets after {progress.confirmed_batches} batches, but "
            f"each takes {rules.fresh_groups} (by buffer.groups_per_step and reuse): it is another configuration's",
            effects,
        )
    elif not (replay.groups.fits(progress) and replay.evaluations.ledger.fits(progress.eval_ledger)):
        replay.end("the checkpoint's account of tickets and attempts does not add up: go on from another", effects)
    elif rules.deterministic:
        replay.end(
            "the buffer's journal is lost, and with it the policies that the next tickets have to be sampled under: "
            "a run with run.deterministic = true cannot go on without it",
            effects,
        )
    else:
        replay.groups.resume(progress, now)
        replay.evaluations.ledger.resume(progress.eval_ledger)
        replay.confirmed_batches = replay.covered = progress.confirmed_batches
        replay.leases.resume_at(progress.next_lease)


def buffer_started(replay: Replay, event: BufferStarted, now: float, effects: list[Effect]) -> None:
    problem = why_not_adopted(replay.rules, event.rules)
    if problem:
        replay.end(problem, effects)
        return
    replay.rules = rules = event.rules
    replay.groups.adopt(rules)
    replay.leases.timeout = rules.lease_timeout
    replay.evaluations.adopt(rules.eval_share, rules.max_tries)


def trainer_joined(replay: Replay, event: TrainerJoined, now: float, effects: list[Effect]) -> None:
    problem = why_no_such_trainer(event.version, replay.confirmed_batches, replay.covered)
    if problem:
        replay.end(problem, effects)
    else:
        replay.trainer, replay.draw_pending = event, False


def checkpointed(replay: Replay, event: Checkpointed, now: float, effects: list[Effect]) -> None:
    replay.covered = max(replay.covered, min(event.version, replay.confirmed_batches))


def open_leases(replay: Replay, node: str) -> list[Lease]:
    """What a node owes, as it would be granted now: for one that may have missed the first message. O(its leases)."""
    known = replay.nodes.get(node)
    return [_message_again(replay, replay.open(lease)) for lease in sorted(known.leases)] if known else []


def _message_again(replay: Replay, lease: LeaseRecord) -> Lease:
    if not isinstance(lease, EvalLease):
        return replay.message_of(lease, replay.groups.by_ticket[lease.ticket], lease.samples)
    current = replay.evaluations.current
    assert current is not None
    return current.message(lease, replay.rules.run_seed)


HANDLERS: Mapping[type, Callable[[Any, Any, float, list[Effect]], None]] = {
    BufferStarted: buffer_started,
    TrainerJoined: trainer_joined,
    Resumed: resumed,
    Checkpointed: checkpointed,
}

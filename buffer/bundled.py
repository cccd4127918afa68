"""Results that came as a bundle (async_rl.bundle): taken in whole where every attempt of it would be, else one by one.

Whole means one look at the lease, one entry of what is held, and one payload to lend, however many attempts these are.
It asks what buffer.replay asks of each result. Wherever the answer is not a plain yes for all of them,
the bundle is taken apart and each attempt judged for itself, so that this file decides nothing.

These handlers belong to `buffer.replay.Replay`, and change its state as its own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from async_rl.trajectory import EncodedTrajectory
from async_rl.version import VersionRun, is_stale
from buffer.events import NOBODYS, BundleArrived, Effect, ResultArrived
from buffer.leases import EvalLease, Held, LeaseRecord
from buffer.ledger import mask_of

if TYPE_CHECKING:
    from buffer.replay import Replay

NOTHING = memoryview(b"")
TakenApart = Callable[[Any], Sequence[EncodedTrajectory]]
"""The payloads of a bundle's attempts."""


def bundle_arrived(replay: Replay, event: BundleArrived, now: float, effects: list[Effect]) -> None:
    lease, samples = replay.leases.find(event.lease), mask_of(event.samples)
    if lease is not None and is_plain(replay, event, lease, samples):
        payload = event.payload
        lease.held += (
            Held(
                samples, min(event.rewards), max(event.rewards), event.version, payload, replay.confirmed_batches, now,
                len(payload),
            ),
        )  # fmt: skip
        replay.groups.accept(lease, samples)
        replay.closed(lease, len(event.samples))
    else:
        replay.deliver(event.lease, alone(event, replay.taken_apart), now, effects)


def is_plain(replay: Replay, event: BundleArrived, lease: LeaseRecord, samples: int) -> bool:
    """Whether each of the attempts is owed, believed and fresh, and none may have to be told from the others later."""
    rules = replay.rules
    return (
        event.node == lease.holder.name
        and len(event.payload) > 0
        and not samples & ~lease.leased
        and (event.version, event.digest) in lease.holder.passed
        and event.version >= lease.min_version
        and not is_stale(replay.confirmed_batches, lease.min_version, rules.max_staleness)
        and not isinstance(lease, EvalLease)
        and not replay.groups.instances.count
        and rules.reuse == 1
        and not rules.deterministic
    )


def alone(event: BundleArrived, taken_apart: TakenApart) -> list[ResultArrived]:
    """The results, each with a payload of its own; a bundle that was nobody's when it came has none, and stays so."""
    payloads: Sequence[EncodedTrajectory] = [NOTHING] * len(event.samples)
    problem = NOBODYS
    if len(event.payload):
        payloads, problem = taken_apart(event.payload), ""
    rows = zip(event.samples, event.rewards, event.n_tokens, event.sampled, payloads, strict=True)
    return [
        ResultArrived(
            event.node, event.lease, sample, "ok", reward, (VersionRun(event.version, event.digest, sampled),),
            n_tokens, payload, problem,
        )
        for sample, reward, n_tokens, sampled, payload in rows
    ]  # fmt: skip


HANDLERS: Mapping[type, Callable[[Any, Any, float, list[Effect]], None]] = {BundleArrived: bundle_arrived}

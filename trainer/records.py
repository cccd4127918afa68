"""What a step leaves in metrics.jsonl and samples.jsonl, from the batch it learned from and the buffer's status."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from async_rl.bundle import Opened
from async_rl.run.lengths import histogram
from async_rl.run.metrics import Record
from async_rl.trajectory import MaskReason, Trajectory
from async_rl.version import oldest_version, token_versions, tokens_of
from async_rl.wire.messages import BatchGroup, Status
from async_rl.wire.seen import Seen
from trainer.backend import StepResult
from trainer.batches import TrainingBatch

LENGTH_QUANTILES = 32  # the lengths of a step's answers are kept as this many quantiles and the smallest
SAMPLED_GROUPS = 4  # per step whose trajectories are kept to look at
SAMPLED_STEPS = 20  # such steps in a run, evenly spread
SAMPLE_TOKENS = 2048  # of a kept trajectory's segment


def batch_record(batch: TrainingBatch) -> Record:
    """Rewards, ages and journeys of the attempts of a batch."""
    ages = batch.ages
    oldest = int(ages.max(initial=0))
    trained_lengths = _trained_lengths(batch)
    return {
        "reward": float(batch.rewards.mean()) if len(batch.rewards) else None,
        "reward_min": float(batch.rewards.min()) if len(batch.rewards) else None,
        "shaped_reward": float(batch.shaped.mean()) if len(batch.shaped) else None,
        **_components(batch.trajectories),
        "truncated": batch.truncated,
        **({} if batch.reference_kl is None else {"reference_kl": batch.reference_kl}),
        "staleness_max": oldest,
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_tokens": np.bincount(ages, minlength=oldest + 1).tolist(),
        "trained": len(batch.rewards),
        "reused": len(batch.rewards) - sum(trained_lengths.values()),
        "dropped": len(batch.outcomes) - len(batch.rewards),
        "nodes": batch.nodes,
        "trained_lengths": trained_lengths,
        "batch_tokens": batch.tokens,
        "data": data_digest(batch.groups, batch.attempts),
        **_journey(batch),
    }


def _components(trajectories: Sequence[Trajectory]) -> Record:
    """The mean of each component of the reward, under its name, over the attempts that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.components.items():
            values.setdefault(name, []).append(value)
    return {f"component.{name}": float(np.mean(each)) for name, each in values.items()}


def _trained_lengths(batch: TrainingBatch) -> dict[str, int]:
    """Sampled tokens of the attempts that train for the first time, masked ones included (async_rl.run.lengths)."""
    fresh = _is_fresh(batch.groups)
    trained = [
        one
        for one, outcome, new in zip(batch.trajectories, batch.outcomes, fresh, strict=True)
        if new and outcome == "trained"
    ]
    lengths = histogram(tokens_of(one.versions) for one in trained)
    return {str(length): count for length, count in sorted(lengths.items())}


def _is_fresh(groups: Sequence[BatchGroup]) -> list[bool]:
    """For each attempt of a batch, whether it is lent for the first time."""
    return [group.uses == 0 for group in groups for _ in range(group.size)]


def data_digest(groups: Sequence[BatchGroup], attempts: Sequence[Opened]) -> str:
    """SHA-256 (its first half) of what a batch is made of, in its order: each group's place and instance, each
    attempt's tokens, log-probabilities, versions and reward. Not who sampled it, when, or under which lease."""
    digest = hashlib.sha256()
    for group in groups:
        digest.update(msgspec.msgpack.encode((group.ticket, group.try_, group.instance, group.size)))
    for attempt in attempts:
        of = attempt.trajectory
        digest.update(msgspec.msgpack.encode((of.sample, of.status, of.reward, of.segments)))
        for arrays in attempt.segments:
            for array in (arrays.tokens, arrays.logprobs, arrays.mask, *arrays.extras.values()):
                digest.update(array)
    return digest.hexdigest()[:32]


def _journey(batch: TrainingBatch) -> Record:
    """How the attempts that a batch trains for the first time spent their time and their age until they were lent.

    Means in seconds over attempts: `queued_s` for a slot, `sampling_s`, `scoring_s` on the node, `held_s` in the
    buffer; `rollout_s` from the batch's first lease to its last accepted result. `in_flight_ages` and `in_queue_ages`
    count attempts by the versions that passed between their oldest token and their arrival at the buffer, and between
    arrival and the draw: the two add up to an attempt's staleness."""
    for_version = batch.for_version
    groups = [group for group in batch.groups if not group.uses]
    fresh = _is_fresh(batch.groups)
    trajectories = [one for one, new in zip(batch.trajectories, fresh, strict=True) if new]
    arrived = [version for group in groups for version in group.arrived]
    held = [seconds for group in groups for seconds in group.held_s]
    if not trajectories or len(arrived) != len(trajectories):
        return {}  # an older buffer, which does not say
    oldest = [oldest_version(trajectory.versions) if trajectory.versions else None for trajectory in trajectories]
    flight = [version - old for version, old in zip(arrived, oldest, strict=True) if old is not None]
    queue = [for_version - version for version, old in zip(arrived, oldest, strict=True) if old is not None]
    lengths = [tokens_of(trajectory.versions) for trajectory in trajectories]
    timings = [trajectory.timings for trajectory in trajectories]
    return {
        "queued_s": float(np.mean([timing.queued_s for timing in timings])),
        "sampling_s": float(np.mean([timing.sampling_s for timing in timings])),
        "scoring_s": float(np.mean([timing.scoring_s for timing in timings])),
        "held_s": float(np.mean(held)),
        "rollout_s": max(group.leased_s for group in groups) - min(held),
        "in_flight_ages": np.bincount(np.maximum(flight, 0)).tolist(),
        "in_queue_ages": np.bincount(np.maximum(queue, 0)).tolist(),
        "length_quantiles": np.quantile(
            lengths, np.linspace(0, 1, LENGTH_QUANTILES + 1), method="nearest"
        ).tolist(),
    }  # fmt: skip


def health(result: StepResult) -> tuple[float | None, float | None]:
    """Effective sample size of the token ratios (a fraction), and k3 (nats a token): what the adaptive bound goes by.
    None where nothing was trained on, or the backend does not say."""
    if not result.metrics.get("tokens"):
        return None, None
    return result.metrics.get("ess_token"), result.metrics.get("k3")


def sample_records(batch: TrainingBatch, step: int) -> list[Record]:
    """Of some groups the first trajectory that was not refused, whole, for people to look at: token ids, mask, version
    runs."""
    records: list[Record] = []
    start = 0
    for group in batch.groups[:SAMPLED_GROUPS]:
        own = range(start, start + group.size)
        start += group.size
        attempt = next((batch.attempts[place] for place in own if batch.outcomes[place] != "refused"), None)
        if attempt is None:
            continue
        trajectory = attempt.trajectory
        records.append(
            {
                "step": step,
                "ticket": group.ticket,
                "lease": trajectory.lease,
                "sample": trajectory.sample,
                "node": trajectory.node,
                "reward": trajectory.reward,
                "components": trajectory.components,
                "segments": [
                    _segment_record(header.versions, header.finish, arrays)
                    for header, arrays in zip(trajectory.segments, attempt.segments, strict=True)
                ],
            }
        )
    return records


def _segment_record(runs: Any, finish: str, arrays: Any) -> Record:
    """`versions` has one entry per token: null where the model did not sample it."""
    sampled = arrays.mask == MaskReason.SAMPLED
    versions = np.full(len(arrays.tokens), -1, dtype=np.int64)
    versions[sampled] = token_versions(runs)
    return {
        "finish": finish,
        "tokens": arrays.tokens[:SAMPLE_TOKENS].tolist(),
        "versions": [None if version < 0 else int(version) for version in versions[:SAMPLE_TOKENS]],
        "logprobs": [round(float(value), 4) for value in arrays.logprobs[:SAMPLE_TOKENS]],
        "omitted": max(0, len(arrays.tokens) - SAMPLE_TOKENS),
    }


def samples_due(step: int, steps: int) -> bool:
    """Whether a step's trajectories are kept: the first, the last, and those evenly between."""
    every = max(1, steps // SAMPLED_STEPS)
    return step % every == 0 or step == steps - 1


def seen_in(status: Status) -> Seen:
    return Seen(status.life, status.pushes, status.mismatch_count)


def pools_record(status: Status, seen: Seen) -> Record:
    """The buffer's view of both pools at one moment; `push_ms` are the pushes completed since what was `seen`, and
    `mismatches` what nodes have shown since then: [node, version, largest |dlogp| in nats, k3]."""
    new, shown = seen.since(seen_in(status))
    return {
        "uptime_s": round(status.uptime_s, 3),
        "confirmed": status.confirmed_batches,
        "ready_groups": status.ready_groups,
        "ready_bytes": status.ready_bytes,
        "reserved_bytes": status.reserved_bytes,
        "waiting": status.waiting,
        "ledger": status.ledger,
        "push_ms": [round(value, 2) for value in (status.push_ms[-new:] if new else ())],
        "mismatches": [
            [each.node, each.version, each.max_dlogp, each.k3] for each in (status.mismatches[-shown:] if shown else ())
        ],
        "quarantined": status.quarantined,
        "returned": status.returned,
        "reused": status.reused,
        "messages": status.messages,
        "adaptive_bound": status.adaptive_bound,
        "nodes": [
            {
                "name": node.name,
                "state": node.state,
                "engine": node.engine,
                "slots": node.slots,
                "version": node.policy.version if node.policy else None,
                "leased": node.leased_samples,
                "busy_s": round(node.busy_s, 3),
                "alive_s": round(node.alive_s, 3),
                "sampled_tokens": node.sampled_tokens,
                "decode_steps": node.decode_steps,
                "reason": node.reason,
                "max_dlogp": node.max_dlogp,
                "k3": node.k3,
                "bound": node.bound,
                "canary": node.canary and node.canary.max_dlogp,
                "first": node.first and node.first.max_dlogp,
                "first_version": node.first and node.first.version,
            }
            for node in status.nodes
        ],
    }

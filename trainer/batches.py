"""From a drawn batch to samples: decode, refuse what is broken or too old, compute advantages.

This is where the staleness guarantee is enforced: whatever the buffer believes, no token older than
for_version - max_staleness reaches a loss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from async_rl.bundle import Opened, attempts_in, opened
from async_rl.config import Config
from async_rl.credit_config import CreditConfig
from async_rl.errors import AsyncRLError
from async_rl.routes import RouteShape, check_routes, routes_of
from async_rl.shards import whole_batch
from async_rl.top_tokens import check_top, top_of
from async_rl.trajectory import (
    MaskReason,
    Trajectory,
    TrajectoryError,
    check_arrays,
)
from async_rl.version import is_stale, judged_version, token_versions, tokens_of
from async_rl.wire.link import Received
from async_rl.wire.messages import Batch, BatchGroup, Disposition, Outcome, dispositions_of
from async_rl.wire.payloads import pack_payloads, unpack_payloads
from trainer.algorithm.advantages import ADVANTAGES, NORMALISATIONS
from trainer.algorithm.ratios import k3_of
from trainer.algorithm.reference_kl import attempt_penalties
from trainer.algorithm.shaping import overlong
from trainer.backend import Backend, Sample

log = logging.getLogger("learner")

WAS_SAMPLED = (MaskReason.SAMPLED, MaskReason.STALE, MaskReason.TRUNCATED)


class TrainingBatch(NamedTuple):
    """What one optimiser step learns from. `ages` are int32 staleness values of all trained tokens; `rewards` float64
    of the attempts that train as they were earned, `shaped` what the advantages were computed from; `truncated` of
    these attempts were cut for their length; `nodes` says how many of them each node sampled; `outcomes` cover
    every attempt, and so do `groups` and `attempts`, as they were lent for `for_version`. `reference_kl` is the
    mean k3 of μ against the reference policy over sampled tokens, where the reward pays for it."""

    samples: list[Sample]
    outcomes: tuple[Outcome, ...]
    rewards: npt.NDArray[np.float64]
    shaped: npt.NDArray[np.float64]
    truncated: int
    ages: npt.NDArray[np.int32]
    tokens: int
    nodes: dict[str, int]
    for_version: int
    groups: tuple[BatchGroup, ...]
    attempts: Sequence[Opened]
    reference_kl: float | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of every attempt; the arrays are with `attempts`."""
        return [attempt.trajectory for attempt in self.attempts]

    @property
    def dispositions(self) -> tuple[Disposition, ...]:
        return dispositions_of(
            (of.lease, of.sample, outcome) for of, outcome in zip(self.trajectories, self.outcomes, strict=True)
        )


def prepare(
    received: Received, config: Config, vocabulary_size: int, routes: RouteShape | None = None
) -> TrainingBatch:
    """`routes`: the shape of those that are to come with every token. Raises AsyncRLError when the batch does not hold
    the trajectories that its groups declare, or for rewards that the configured advantage is not for."""
    credit = config.algorithm
    batch: Batch = received.message
    attempts = _attempts(received)
    sizes = [group.size for group in batch.groups]
    if sum(sizes) != len(attempts) or min(sizes, default=0) < 0:
        raise AsyncRLError(f"batch {batch.batch}: {sum(sizes)} trajectories declared, {len(attempts)} received")
    groups = np.repeat(np.arange(len(sizes)), sizes).tolist()
    outcomes = [_outcome(attempt, batch.for_version, vocabulary_size, config, routes) for attempt in attempts]
    kept = [
        (group, attempt)
        for group, attempt, outcome in zip(groups, attempts, outcomes, strict=True)
        if outcome == "trained"
    ]
    trajectories = [attempt.trajectory for _, attempt in kept]
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    shaped = rewards + _overlong(trajectories, credit, config.inference.max_new_tokens)
    advantages = _advantages(shaped, [group for group, _ in kept], credit)
    samples = [
        sample
        for number, (group, attempt) in enumerate(kept)
        for sample in _samples(attempt, advantages[number], number, group, batch.for_version, config)
    ]
    ages = np.concatenate(
        [np.zeros(0, np.int32), *(sample.ages[sample.mask == MaskReason.SAMPLED] for sample in samples)]
    )
    return TrainingBatch(
        samples,
        tuple(outcomes),
        rewards,
        shaped,
        sum(map(_is_truncated, trajectories)),
        ages,
        sum(len(sample.tokens) for sample in samples),
        dict(Counter(trajectory.node for trajectory in trajectories)),
        batch.for_version,
        batch.groups,
        attempts,
    )


def whole_draw(parts: Sequence[Received]) -> Received:
    """The batch whose parts the buffer's shards have lent, as one buffer would have lent it. Raises AsyncRLError when a
    part does not hold the trajectories that its groups declare."""
    if len(parts) == 1:
        return parts[0]
    first: Batch = parts[0].message
    try:
        drawn = [(part.message.groups, unpack_payloads(part.message.trajectories, part.blobs)) for part in parts]
        groups, payloads = whole_batch(drawn, attempts_in)
    except (msgspec.MsgspecError, ValueError) as error:
        raise AsyncRLError(f"batch {first.batch}: {error}") from error
    inline, blobs = pack_payloads(payloads)
    batch = Batch(first.batch, first.for_version, tuple(groups), inline)
    return Received(parts[0].peer, batch, [memoryview(blob) for blob in blobs])


def with_reference_kl(batch: TrainingBatch, backend: Backend, credit: CreditConfig) -> TrainingBatch:
    """`penalised`, where the config asks for that: it costs a forward pass of the reference policy."""
    if credit.reference_kl == "none" or credit.reference_kl_place != "reward":
        return batch
    whole = [sample._replace(mask=np.where(_was_sampled(sample), 0, sample.mask)) for sample in batch.samples]
    return penalised(batch, backend.reference(whole), credit)


def _was_sampled(sample: Sample) -> npt.NDArray[np.bool_]:
    """bool [n]: tokens of the model's own, those included that do not train for their age or their answer's length."""
    return np.isin(sample.mask, WAS_SAMPLED)


def penalised(
    batch: TrainingBatch, reference: Sequence[npt.NDArray[np.float32]], credit: CreditConfig
) -> TrainingBatch:
    """The batch with `reference_kl_weight` times each attempt's distance to the reference policy taken from its reward,
    and advantages computed anew. The distance is that of all tokens that were sampled, trained or not: the reward is
    the whole answer's, and others are compared with it. `reference` are log π_ref of each sample's tokens, float32[n]
    each."""
    if not batch.samples:
        return batch
    counts = [_was_sampled(sample) for sample in batch.samples]
    attempt = np.repeat([sample.attempt for sample in batch.samples], [int(which.sum()) for which in counts])
    behaviour = np.concatenate([sample.behaviour[which] for sample, which in zip(batch.samples, counts, strict=True)])
    of_reference = np.concatenate([each[which] for each, which in zip(reference, counts, strict=True)])
    gap = torch.from_numpy(of_reference.astype(np.float64) - behaviour)
    penalty = attempt_penalties(gap, torch.from_numpy(attempt), len(batch.rewards))
    shaped = batch.shaped - credit.reference_kl_weight * penalty.numpy()
    groups = {sample.attempt: sample.group for sample in batch.samples}
    advantages = _advantages(shaped, [groups[attempt] for attempt in range(len(shaped))], credit)
    samples = [sample._replace(advantage=advantages[sample.attempt]) for sample in batch.samples]
    return batch._replace(samples=samples, shaped=shaped, reference_kl=float(k3_of(gap).mean()) if len(gap) else 0.0)


def _overlong(trajectories: Sequence[Trajectory], credit: CreditConfig, max_new_tokens: int) -> npt.NDArray[np.float64]:
    lengths = [tokens_of(trajectory.versions) for trajectory in trajectories]
    added = overlong(
        torch.tensor(lengths, dtype=torch.int64), max_new_tokens, credit.overlong_buffer, credit.overlong_penalty
    )
    return added.numpy()


def _advantages(rewards: npt.NDArray[np.float64], groups: Sequence[int], credit: CreditConfig) -> list[float]:
    group = torch.tensor(groups, dtype=torch.int64)
    advantages = ADVANTAGES[credit.advantage](torch.from_numpy(rewards), group)
    values: list[float] = NORMALISATIONS[credit.advantage_normalisation](advantages).tolist()
    return values


def _is_truncated(trajectory: Trajectory) -> bool:
    return trajectory.segments[-1].finish == "length"


def _attempts(received: Received) -> list[Opened]:
    try:
        payloads = unpack_payloads(received.message.trajectories, received.blobs)
        return [attempt for payload in payloads for attempt in opened(payload)]
    except (msgspec.MsgspecError, ValueError, TrajectoryError) as error:
        raise AsyncRLError(f"batch {received.message.batch}: a trajectory cannot be decoded: {error}") from error


def _outcome(
    attempt: Opened, for_version: int, vocabulary_size: int, config: Config, routes: RouteShape | None
) -> Outcome:
    centred, buffer, trajectory = config.algorithm.center_scores, config.buffer, attempt.trajectory
    try:
        if attempt.problem:
            raise TrajectoryError(attempt.problem)
        check_arrays(trajectory, attempt.segments, vocabulary_size)
        for arrays in attempt.segments:
            if centred:
                check_top(arrays, centred, vocabulary_size, f"attempt {trajectory.attempt}")
            if routes is not None:
                check_routes(arrays, routes, f"attempt {trajectory.attempt}")
        if not trajectory.versions:
            raise TrajectoryError(f"attempt {trajectory.attempt}: nothing was sampled (status {trajectory.status})")
    except TrajectoryError as error:
        log.error("refused: %s (node %s)", error, trajectory.node)
        return "refused"
    judged = judged_version(trajectory.versions, buffer.on_stale)
    return "stale" if is_stale(for_version, judged, buffer.max_staleness) else "trained"


def _samples(
    attempt: Opened, advantage: float, number: int, group: int, for_version: int, config: Config
) -> Sequence[Sample]:
    """Of the attempt that trains in place `number`. Tokens older than max_staleness do not train: where an attempt may
    have some, they are masked. Nor, with truncated = "mask", do those of an answer that was cut."""
    samples, trajectory = [], attempt.trajectory
    cut = config.algorithm.truncated == "mask" and _is_truncated(trajectory)
    for header, arrays in zip(trajectory.segments, attempt.segments, strict=True):
        mask = arrays.mask
        sampled = mask == MaskReason.SAMPLED
        ages = np.zeros(len(arrays.tokens), dtype=np.int32)
        ages[sampled] = for_version - token_versions(header.versions)
        too_old = sampled & (ages > config.buffer.max_staleness)
        if cut:
            mask = np.where(sampled, np.uint8(MaskReason.TRUNCATED), mask)
        if too_old.any():
            mask = np.where(too_old, np.uint8(MaskReason.STALE), mask)
        top = top_of(arrays) if config.algorithm.center_scores else None
        routes = routes_of(arrays) if config.algorithm.router_replay == "rollout" else None
        samples.append(Sample(arrays.tokens, arrays.logprobs, mask, ages, advantage, number, group, top, routes))
    return samples

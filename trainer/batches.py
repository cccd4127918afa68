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

from async_rl.errors import AsyncRLError
from async_rl.trajectory import (
    MaskReason,
    Trajectory,
    TrajectoryError,
    check_trajectory,
    decode_trajectory,
    segment_arrays,
)
from async_rl.version import is_stale, judged_version, token_versions
from async_rl.wire.link import Received
from async_rl.wire.messages import Batch, BatchGroup, Disposition, Outcome
from async_rl.wire.payloads import unpack_payloads
from trainer.algorithm.advantages import ADVANTAGES
from trainer.backend import Sample

log = logging.getLogger("learner")


class TrainingBatch(NamedTuple):
    """What one optimiser step learns from. `ages` are int32 staleness values of all trained tokens; `rewards` float64
    of the attempts that train; `nodes` says how many of them each node sampled; `dispositions` cover every attempt, and
    so do `groups` and `trajectories`, as they were lent for `for_version`."""

    samples: list[Sample]
    dispositions: tuple[Disposition, ...]
    rewards: npt.NDArray[np.float64]
    ages: npt.NDArray[np.int32]
    tokens: int
    nodes: dict[str, int]
    for_version: int
    groups: tuple[BatchGroup, ...]
    trajectories: Sequence[Trajectory]


def prepare(
    received: Received, max_staleness: int, vocabulary_size: int, advantage: str, on_stale: str = "wait"
) -> TrainingBatch:
    """Raises AsyncRLError when the batch does not hold the trajectories that its groups declare."""
    batch: Batch = received.message
    trajectories = _trajectories(received)
    sizes = [group.size for group in batch.groups]
    if sum(sizes) != len(trajectories) or min(sizes, default=0) < 0:
        raise AsyncRLError(f"batch {batch.batch}: {sum(sizes)} trajectories declared, {len(trajectories)} received")
    groups = np.repeat(np.arange(len(sizes)), sizes)
    kept, dispositions = [], []
    for group, trajectory in zip(groups, trajectories, strict=True):
        outcome = _outcome(trajectory, batch.for_version, max_staleness, vocabulary_size, on_stale)
        dispositions.append(Disposition(trajectory.lease, trajectory.sample, outcome))
        if outcome == "trained":
            kept.append((int(group), trajectory))
    rewards = np.array([trajectory.reward for _, trajectory in kept], dtype=np.float64)
    group_index = np.array([group for group, _ in kept], dtype=np.int64)
    advantages = ADVANTAGES[advantage](torch.from_numpy(rewards), torch.from_numpy(group_index))
    samples = [
        sample
        for attempt, (group, trajectory) in enumerate(kept)
        for sample in _samples(trajectory, float(advantages[attempt]), attempt, group, batch.for_version, max_staleness)
    ]
    ages = np.concatenate(
        [np.zeros(0, np.int32), *(sample.ages[sample.mask == MaskReason.SAMPLED] for sample in samples)]
    )
    tokens = sum(len(sample.tokens) for sample in samples)
    nodes = dict(Counter(trajectory.node for _, trajectory in kept))
    return TrainingBatch(
        samples, tuple(dispositions), rewards, ages, tokens, nodes, batch.for_version, batch.groups,
        trajectories,
    )  # fmt: skip


def _trajectories(received: Received) -> list[Trajectory]:
    try:
        return [
            decode_trajectory(payload) for payload in unpack_payloads(received.message.trajectories, received.blobs)
        ]
    except (msgspec.MsgspecError, ValueError) as error:
        raise AsyncRLError(f"batch {received.message.batch}: a trajectory cannot be decoded: {error}") from error


def _outcome(
    trajectory: Trajectory, for_version: int, max_staleness: int, vocabulary_size: int, on_stale: str
) -> Outcome:
    try:
        check_trajectory(trajectory, vocabulary_size)
        if not trajectory.versions:
            raise TrajectoryError(f"attempt {trajectory.attempt}: nothing was sampled (status {trajectory.status})")
    except TrajectoryError as error:
        log.error("refused: %s (node %s)", error, trajectory.node)
        return "refused"
    judged = judged_version(trajectory.versions, on_stale)
    return "stale" if is_stale(for_version, judged, max_staleness) else "trained"


def _samples(
    trajectory: Trajectory, advantage: float, attempt: int, group: int, for_version: int, max_staleness: int
) -> Sequence[Sample]:
    """Tokens older than `max_staleness` do not train: where an attempt may have some, they are masked."""
    samples = []
    for header, arrays in zip(trajectory.segments, segment_arrays(trajectory), strict=True):
        mask = arrays.mask
        ages = np.zeros(len(arrays.tokens), dtype=np.int32)
        ages[mask == MaskReason.SAMPLED] = for_version - token_versions(header.versions)
        too_old = (mask == MaskReason.SAMPLED) & (ages > max_staleness)
        if too_old.any():
            mask = np.where(too_old, np.uint8(MaskReason.STALE), mask)
        samples.append(Sample(arrays.tokens, arrays.logprobs, mask, ages, advantage, attempt, group))
    return samples

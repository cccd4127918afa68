"""From lease to trajectory: the rollout worker's book-keeping, without sockets, threads or engine.

A lease becomes one request per sample; a completion becomes text to score; a score becomes a trajectory. This module
holds what is open in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from async_rl.tasks.rendering import decode, render
from async_rl.tasks.task import Task, instance_of
from async_rl.trajectory import MaskReason, Segment, Timings, Trajectory, pack_segments
from async_rl.wire.messages import Lease
from inference.engine import Completion, Request

EMPTY = memoryview(b"")
NOTE_CHARACTERS = 200  # of an error: a note must fit into what was reserved for an attempt


class Open(NamedTuple):
    lease: Lease
    prompt: np.ndarray[Any, np.dtype[np.int32]]


class ToScore(NamedTuple):
    key: tuple[int, int]
    split: str
    instance_id: int
    completion: str


class RolloutBook:
    """Open leases of one node, and what each of their samples waits for."""

    def __init__(self, task: Task, tokenizer: Any, node: str, engine: str) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._node = node
        self._engine = engine
        self._open: dict[int, Open] = {}
        self._left: dict[int, set[int]] = {}
        self._sampled: dict[tuple[int, int], Completion] = {}
        self.closed_training_samples = 0
        """Samples of training leases that need this node no longer: delivered, failed or cancelled."""

    def open(self, lease: Lease) -> list[Request]:
        """Build the instance, render and tokenise it, and make one request per sample."""
        instance = instance_of(self._task, lease.split, lease.instance)
        prompt = np.asarray(render(instance, self._tokenizer), dtype=np.int32)
        self._open[lease.lease] = Open(lease, prompt)
        self._left[lease.lease] = set(lease.samples)
        return [
            Request((lease.lease, sample), prompt, lease.sampling, seed, lease.policy)
            for sample, seed in zip(lease.samples, lease.seeds, strict=True)
        ]

    def leases(self) -> list[int]:
        """Every lease that is open here."""
        return list(self._open)

    def sampled(self, completion: Completion) -> ToScore | Trajectory | None:
        """What to do with a completion: score it; report an abort; nothing when its lease was cancelled."""
        lease, _ = completion.key
        if lease not in self._open:
            return None
        if completion.finish == "abort":
            return self._failed(completion.key, "aborted", "the engine aborted it")
        self._sampled[completion.key] = completion
        of = self._open[lease].lease
        return ToScore(completion.key, of.split, of.instance, decode(completion.tokens, self._tokenizer))

    def scored(
        self, key: tuple[int, int], reward: float, components: dict[str, float], seconds: float, error: str
    ) -> Trajectory | None:
        """The finished trajectory. A failed score is env_failed, never reward 0; None when the lease was cancelled."""
        completion = self._sampled.pop(key, None)
        if completion is None:
            return None
        if error:
            return self._failed(key, "env_failed", error)
        headers, arrays = pack_segments([self._segment(completion)])
        self._close(key)
        return Trajectory(
            lease=key[0],
            sample=key[1],
            status="ok",
            reward=reward,
            segments=headers,
            arrays=arrays,
            components=components,
            node=self._node,
            engine=self._engine,
            timings=Timings(completion.queued_s, completion.sampling_s, seconds),
        )

    def unstarted(self, key: tuple[int, int], reason: str) -> Trajectory | None:
        """A sample whose pinned policy could not be had; None when its lease was cancelled."""
        return self._failed(key, "aborted", reason) if key[0] in self._open else None

    def refused(self, lease: Lease, reason: str) -> list[Trajectory]:
        """All samples of a lease that cannot be started (a broken instance, a prompt that is too long)."""
        if lease.lease in self._open:
            self.cancel(lease.lease)
        elif lease.split == "train":  # its instance could not even be made
            self.closed_training_samples += len(lease.samples)
        return [
            Trajectory(
                lease.lease, sample, "env_failed", 0.0, (), EMPTY, node=self._node, note=reason[:NOTE_CHARACTERS]
            )
            for sample in lease.samples
        ]

    def cancel(self, lease: int) -> Iterator[tuple[int, int]]:
        """Forget a lease; yields the keys whose requests must be aborted."""
        entry = self._open.pop(lease, None)
        left = self._left.pop(lease, set())
        if entry is not None and entry.lease.split == "train":
            self.closed_training_samples += len(left)
        keys = [(lease, sample) for sample in sorted(left)]
        for key in keys:
            self._sampled.pop(key, None)
        return iter(keys)

    def _segment(self, completion: Completion) -> Segment:
        prompt = self._open[completion.key[0]].prompt
        n_prompt, n_new = len(prompt), len(completion.tokens)
        return Segment(
            tokens=np.concatenate([prompt, completion.tokens]),
            logprobs=np.concatenate([np.zeros(n_prompt, np.float32), completion.logprobs]),
            mask=np.repeat(np.array([MaskReason.PROMPT, MaskReason.SAMPLED], np.uint8), [n_prompt, n_new]),
            versions=completion.versions,
            finish=completion.finish,
        )

    def _failed(self, key: tuple[int, int], status: Any, note: str) -> Trajectory:
        self._close(key)
        return Trajectory(
            key[0], key[1], status, 0.0, (), EMPTY, node=self._node, engine=self._engine, note=note[:NOTE_CHARACTERS]
        )

    def _close(self, key: tuple[int, int]) -> None:
        lease, sample = key
        self._left[lease].discard(sample)
        if self._open[lease].lease.split == "train":
            self.closed_training_samples += 1
        if not self._left[lease]:
            del self._left[lease], self._open[lease]

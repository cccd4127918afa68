"""From lease to trajectory: the rollout worker's book-keeping, without sockets, threads or engine.

A lease becomes one request per sample; a completion becomes text to score; a score becomes a trajectory. This module
holds what is open in between. Where attempts have several calls of the model (inference.episodes), a lease becomes one
attempt per sample, to be played.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from async_rl.routes import route_extras, routes_of
from async_rl.tasks.rendering import decode, render
from async_rl.tasks.task import Split, Task, instance_of
from async_rl.top_tokens import top_extras
from async_rl.trajectory import (
    MaskReason,
    Packed,
    PositionReward,
    Segment,
    Status,
    Timings,
    Trajectory,
    TrajectoryError,
    check_trajectory,
    lay_out,
    pack_segments,
    segment_arrays,
)
from async_rl.version import PolicyId
from async_rl.wire.messages import Lease, SamplingParams
from inference.engine import Completion, Prefix, Request
from inference.transcript import Transcript

EMPTY = memoryview(b"")
NOTE_CHARACTERS = 200  # of an error: a note must fit into what was reserved for an attempt


Key = tuple[int, int]


def is_call(key: Key) -> bool:
    """Whether an engine's request is a call of an attempt that has several, and not a sample of a lease."""
    return key[1] < 0


class Attempt(NamedTuple):
    """One attempt to be played: (lease, sample), which instance of which task (the name of a set of evaluation that has
    one of its own, "" for the run's), and how to sample for it."""

    key: Key
    task: str
    split: Split
    instance: int
    seed: int
    sampling: SamplingParams
    policy: PolicyId | None


class Outcome(NamedTuple):
    """What came of playing an attempt. Its reward is `reward`, the rewards of its turns (Transcript.rewarded) and, with
    an `answer`, the task's score of that. `cut`: a limit ended it, before it was done."""

    reward: float = 0.0
    components: Mapping[str, float] = {}
    cut: bool = False
    answer: str | None = None


class Played(NamedTuple):
    """`seconds` that the attempt's world took."""

    transcript: Transcript
    outcome: Outcome
    seconds: float = 0.0


class Open(NamedTuple):
    lease: Lease
    prompt: np.ndarray[Any, np.dtype[np.int32]]


class ToScore(NamedTuple):
    key: tuple[int, int]
    split: str
    instance_id: int
    completion: str
    eval_set: str = ""


class RolloutBook:
    """Open leases of one node, and what each of their samples waits for. `eval_tasks` are those of the sets of
    evaluation that have one of their own. `plays`: of which tasks attempts have several calls, by the set's name, ""
    for the run's."""

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        node: str,
        engine: str,
        eval_tasks: Mapping[str, Task] | None = None,
        plays: Collection[str] = (),
    ) -> None:
        self._task = task
        self._eval_tasks = eval_tasks or {}
        self._tokenizer = tokenizer
        self._node = node
        self._engine = engine
        self._open: dict[int, Open] = {}
        self._left: dict[int, set[int]] = {}
        self._sampled: dict[Key, Completion] = {}
        self._plays = frozenset(plays)
        self._reads = any(getattr(each, "reads_forward", False) for each in (task, *self._eval_tasks.values()))
        self._played: dict[Key, Played] = {}
        self.closed_training_samples = 0
        """Samples of training leases that need this node no longer: delivered, failed or cancelled."""

    def reading(self, working: Callable[[str], AbstractContextManager[None]]) -> AbstractContextManager[None]:
        """Around `open`: a watchdog's patience where making an instance may mean to read much of a stream."""
        return working("reads its data up to what was leased") if self._reads else nullcontext()

    def open(self, lease: Lease) -> list[Request] | list[Attempt]:
        """Build the instance, render and tokenise it, and make one request per sample; or one attempt to be played."""
        task = lease.eval_set if lease.eval_set in self._eval_tasks else ""
        if task in self._plays:
            self._open[lease.lease] = Open(lease, np.zeros(0, np.int32))
            self._left[lease.lease] = set(lease.samples)
            return [
                Attempt((lease.lease, sample), task, lease.split, lease.instance, seed, lease.sampling, lease.policy)
                for sample, seed in zip(lease.samples, lease.seeds, strict=True)
            ]
        instance = instance_of(self._eval_tasks.get(task, self._task), lease.split, lease.instance)
        prompt = np.asarray(render(instance, self._tokenizer), dtype=np.int32)
        self._open[lease.lease] = Open(lease, prompt)
        self._left[lease.lease] = set(lease.samples)
        return [
            Request((lease.lease, sample), prompt, lease.sampling, seed, lease.policy)
            for sample, seed in zip(lease.samples, lease.seeds, strict=True)
        ]

    def take_over(self, lease: Lease, prefixes: Sequence[Trajectory]) -> list[Request | ToScore]:
        """Samples that another node began, in the order of the lease: a request that goes on after what it sampled, or
        what is to be scored when that was all. Raises TrajectoryError for a prefix that contradicts itself or is of
        another attempt."""
        begun = [self._completion_of(lease, trajectory) for trajectory in prefixes]
        if [completion.key[1] for completion, _ in begun] != list(lease.samples):
            raise TrajectoryError(f"lease {lease.lease} is handed over for {lease.samples}, with prefixes of others")
        self._open[lease.lease] = Open(lease, begun[0][1])
        self._left[lease.lease] = set(lease.samples)
        work: list[Request | ToScore] = []
        for (completion, prompt), seed in zip(begun, lease.seeds, strict=True):
            if completion.finish == "abort":
                last = completion.versions[-1]
                prefix = Prefix(
                    completion.tokens, completion.logprobs, completion.versions, completion.queued_s,
                    completion.sampling_s, PolicyId("main", last.version, last.digest),
                )  # fmt: skip
                work.append(Request(completion.key, prompt, lease.sampling, seed, None, prefix))
            else:
                self._sampled[completion.key] = completion
                work.append(self._to_score(completion))
        return work

    def _completion_of(self, lease: Lease, trajectory: Trajectory) -> tuple[Completion, np.ndarray[Any, Any]]:
        """What `handed_over` made a trajectory of, and the prompt."""
        check_trajectory(trajectory)
        if trajectory.lease != lease.lease or len(trajectory.segments) != 1:
            raise TrajectoryError(f"attempt {trajectory.attempt} is no prefix of lease {lease.lease}")
        (arrays,), header, timings = segment_arrays(trajectory), trajectory.segments[0], trajectory.timings
        sampled = arrays.mask == MaskReason.SAMPLED
        tokens = arrays.tokens[sampled]
        completion = Completion(
            (lease.lease, trajectory.sample), tokens, arrays.logprobs[sampled], header.versions, header.finish,
            timings.queued_s, timings.sampling_s, len(tokens), routes=routes_of(arrays),
        )  # fmt: skip
        return completion, arrays.tokens[~sampled]

    def leases(self) -> list[int]:
        """Every lease that is open here."""
        return list(self._open)

    def pinned(self) -> set[PolicyId]:
        """The policies to which open leases are pinned."""
        return {entry.lease.policy for entry in self._open.values() if entry.lease.policy is not None}

    def has(self, lease: int) -> bool:
        return lease in self._open

    @property
    def granted(self) -> int:
        """Training samples that this node has been given so far, closed or not."""
        training = (lease for lease, entry in self._open.items() if entry.lease.split == "train")
        return self.closed_training_samples + sum(len(self._left[lease]) for lease in training)

    @property
    def sampled_training_samples(self) -> int:
        """Training samples that need this node's engine no longer: closed, or being scored. Those that it still owes
        it are to fill it, however long scoring takes."""
        scoring = (key[0] for each in (self._sampled, self._played) for key in each)
        return self.closed_training_samples + sum(self._open[lease].lease.split == "train" for lease in scoring)

    def sampled(self, completion: Completion) -> ToScore | Packed | None:
        """What to do with a completion: score it; report an abort; nothing when its lease was cancelled."""
        lease, _ = completion.key
        if lease not in self._open:
            return None
        if completion.finish == "abort":
            return self._failed(completion.key, "aborted", "the engine aborted it")
        self._sampled[completion.key] = completion
        return self._to_score(completion)

    def _to_score(self, completion: Completion) -> ToScore:
        of = self._open[completion.key[0]].lease
        text = decode(completion.tokens, self._tokenizer)
        return ToScore(completion.key, of.split, of.instance, text, of.eval_set)

    def scored(
        self, key: tuple[int, int], reward: float, components: dict[str, float], seconds: float, error: str
    ) -> Packed | None:
        """The finished trajectory. A failed score is env_failed, never reward 0; None when the lease was cancelled."""
        played = self._played.pop(key, None)
        completion = self._sampled.pop(key, None)
        if played is None and completion is None:
            return None
        if error:
            return self._failed(key, "env_failed", error)
        if played is not None:
            return self._finished(key, played, reward, components, seconds)
        assert completion is not None
        timings = Timings(completion.queued_s, completion.sampling_s, seconds)
        return self._ok(key, [self._segment(completion)], reward, components, timings)

    def played(self, key: Key, played: Played, status: Status, error: str) -> ToScore | Packed | None:
        """What to do with an attempt that was played: score its answer, or send it; a failed one is never reward 0.
        None when its lease was cancelled."""
        if key[1] not in self._left.get(key[0], ()):
            return None
        if error:
            return self._failed(key, status, error)
        if not played.transcript.n_segments:
            return self._failed(key, "env_failed", "it ended before the model said anything")
        if played.outcome.answer is None:
            return self._finished(key, played, 0.0, {}, 0.0)
        self._played[key] = played
        of = self._open[key[0]].lease
        return ToScore(key, of.split, of.instance, played.outcome.answer, of.eval_set)

    def _finished(self, key: Key, played: Played, score: float, components: dict[str, float], seconds: float) -> Packed:
        transcript, outcome, world_s = played
        rewards = transcript.position_rewards
        reward = score + outcome.reward + math.fsum(each.value for each in rewards)
        if not math.isfinite(reward):
            return self._failed(key, "env_failed", f"the reward is {reward}")
        trains = self._open[key[0]].lease.split == "train"
        segments = transcript.segments(cut=outcome.cut, trains=trains)
        timings = Timings(transcript.queued_s, transcript.sampling_s, world_s + seconds)
        return self._ok(key, segments, reward, {**outcome.components, **components}, timings, rewards)

    def _ok(
        self,
        key: Key,
        segments: Sequence[Segment],
        reward: float,
        components: dict[str, float],
        timings: Timings,
        position_rewards: tuple[PositionReward, ...] = (),
    ) -> Packed:
        headers, pieces = lay_out(segments)
        self._close(key)
        trajectory = Trajectory(
            lease=key[0],
            sample=key[1],
            status="ok",
            reward=reward,
            segments=headers,
            arrays=EMPTY,
            components=components,
            position_rewards=position_rewards,
            node=self._node,
            engine=self._engine,
            timings=timings,
        )
        return Packed(trajectory, pieces)

    def unstarted(self, key: tuple[int, int], reason: str) -> Packed | None:
        """A sample whose pinned policy could not be had; None when its lease was cancelled."""
        return self._failed(key, "aborted", reason) if key[0] in self._open else None

    def refused(self, lease: Lease, reason: str) -> list[Packed]:
        """All samples of a lease that cannot be started (a broken instance, a prompt that is too long)."""
        if lease.lease in self._open:
            self.cancel(lease.lease)
        elif lease.split == "train":  # its instance could not even be made
            self.closed_training_samples += len(lease.samples)
        note = reason[:NOTE_CHARACTERS]
        return [
            Packed(Trajectory(lease.lease, sample, "env_failed", 0.0, (), EMPTY, node=self._node, note=note))
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
            self._played.pop(key, None)
        return iter(keys)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def owed(self) -> list[tuple[int, int]]:
        """Every sample that is not delivered yet."""
        return [(lease, sample) for lease, samples in self._left.items() for sample in sorted(samples)]

    def being_scored(self, key: tuple[int, int]) -> Completion | None:
        return self._sampled.get(key)

    def is_evaluation(self, key: tuple[int, int]) -> bool:
        return self._open[key[0]].lease.split == "eval"

    def handed_over(self, so_far: Completion) -> Trajectory:
        """What was sampled of an attempt that goes on elsewhere; this node owes it no longer."""
        headers, arrays = pack_segments([self._segment(so_far)])
        timings = Timings(so_far.queued_s, so_far.sampling_s)
        self.forget(so_far.key)
        return Trajectory(
            *so_far.key, "aborted", 0.0, headers, arrays, node=self._node, engine=self._engine, timings=timings
        )

    def forget(self, key: tuple[int, int]) -> None:
        """A sample that is given back: nothing will come of it here."""
        self._sampled.pop(key, None)
        self._played.pop(key, None)
        self._close(key)

    # --- trajectories ------------------------------------------------------------------------------------------------

    def _segment(self, completion: Completion) -> Segment:
        prompt = self._open[completion.key[0]].prompt
        n_prompt, n_new = len(prompt), len(completion.tokens)
        trains = self._open[completion.key[0]].lease.split == "train"
        extras: dict[str, np.ndarray[Any, Any]] = {}
        if completion.top is not None and trains:
            extras |= top_extras(completion.top, n_prompt)
        if completion.routes is not None and trains:
            extras |= route_extras(completion.routes, n_prompt + n_new)
        return Segment(
            tokens=np.concatenate([prompt, completion.tokens]),
            logprobs=np.concatenate([np.zeros(n_prompt, np.float32), completion.logprobs]),
            mask=np.repeat(np.array([MaskReason.PROMPT, MaskReason.SAMPLED], np.uint8), [n_prompt, n_new]),
            versions=completion.versions,
            finish=completion.finish,
            extras=extras,
        )

    def _failed(self, key: tuple[int, int], status: Any, note: str) -> Packed:
        self._close(key)
        note = note[:NOTE_CHARACTERS]
        return Packed(Trajectory(*key, status, 0.0, (), EMPTY, node=self._node, engine=self._engine, note=note))

    def _close(self, key: tuple[int, int]) -> None:
        lease, sample = key
        self._left[lease].discard(sample)
        if self._open[lease].lease.split == "train":
            self.closed_training_samples += 1
        if not self._left[lease]:
            del self._left[lease], self._open[lease]

"""A scoring worker's process: it builds the task, and judges what it is sent.

The node speaks to it over its standard input and output in frames (async_rl.run.pipes): `Setup`, answered with `Ready`,
then a `Verdict` for every `Job`, until the input ends; with `Reading` before it where a task reads its data forward.
Verdicts of a task that scores several at once, each in a thread of its own, come in any order. It imports nothing that
is slow or optional.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from async_rl.run.pipes import die_with, take_over_pipes
from async_rl.tasks.registry import load_task
from async_rl.tasks.task import Score, Split, instance_of

CACHED_INSTANCES = 256  # the samples of a group ask for the same one


class Setup(msgspec.Struct, array_like=True):
    """`eval_tasks` are those of sets of evaluation that have a table of their own, by name."""

    task: dict[str, Any]
    eval_tasks: dict[str, dict[str, Any]] = {}


class Ready(msgspec.Struct, array_like=True):
    """How many completions it scores at once, and what one may take beyond the time-out: as the tasks' rewards say."""

    error: str
    concurrency: int = 1
    seconds: float = 0.0


class Job(msgspec.Struct, array_like=True):
    number: int
    split: Split
    instance: int
    completion: str
    eval_set: str


class Reading(msgspec.Struct, array_like=True, tag=True):
    """The worker reads its task's data up to the instance of a job, or this waits for another of its task to be done;
    `done`: now it is scored."""

    number: int
    done: bool


class Verdict(msgspec.Struct, array_like=True, tag=True):
    number: int
    reward: float
    components: dict[str, float]
    seconds: float
    error: str


class Judge:
    """A task, to score its completions. `limit` of them at once: what its rewards allow, or one."""

    def __init__(self, task: Any) -> None:
        rewards = getattr(task, "rewards", None)
        self.limit, self.seconds = (rewards.concurrency, rewards.seconds) if rewards else (1, 0.0)
        self._task = task
        self.tells = bool(getattr(task, "reads_forward", False))
        """Whether to say when scoring really begins."""
        self._instances = functools.lru_cache(CACHED_INSTANCES)(functools.partial(instance_of, task))
        self._making, self._scoring = threading.Lock(), threading.BoundedSemaphore(self.limit)

    def judge(self, job: Job, tell: Callable[[Reading], None]) -> Verdict:
        """Whatever the verifier raises, or returns that is no score, becomes the verdict's error."""
        start = time.perf_counter()
        try:
            if self.tells:
                tell(Reading(job.number, False))
            with self._making:  # it is the rewards that several threads may ask, not the task
                instance = self._instances(job.split, job.instance)
            with self._scoring:
                if self.tells:
                    tell(Reading(job.number, True))
                reward, components = self._task.score(instance, job.completion)
            score = Score(float(reward), {str(name): float(value) for name, value in components.items()})
            if not math.isfinite(score.reward):
                raise ValueError(f"the reward is {score.reward}")
        except (Exception, SystemExit) as error:
            detail = f"{type(error).__name__}: {error}"
            return Verdict(job.number, 0.0, {}, time.perf_counter() - start, f"scoring failed: {detail}")
        return Verdict(job.number, score.reward, score.components, time.perf_counter() - start, "")


def main(parent: int) -> None:
    die_with(parent)
    jobs, answer = take_over_pipes()
    setup = msgspec.msgpack.decode(next(jobs), type=Setup)
    try:
        ours = Judge(load_task(setup.task))
        theirs = {name: Judge(load_task(table)) for name, table in setup.eval_tasks.items()}
    except Exception as error:
        answer(Ready(f"{type(error).__name__}: {error}"))
        return
    for each in theirs.values():  # so many may be sent at once, and some tasks score fewer
        each.tells |= each.limit < ours.limit
    seconds = max(each.seconds for each in (ours, *theirs.values()))
    answer(Ready("", ours.limit, seconds))
    decoder = msgspec.msgpack.Decoder(Job)
    answering = threading.Lock()

    def tell(what: Verdict | Reading) -> None:
        with answering:
            answer(what)

    def work(job: Job) -> None:
        tell(theirs.get(job.eval_set, ours).judge(job, tell))

    if ours.limit == 1:
        for body in jobs:
            work(decoder.decode(body))
        return
    pool = ThreadPoolExecutor(ours.limit)
    for body in jobs:
        pool.submit(work, decoder.decode(body))
    os._exit(0)  # nobody reads what they would still answer


if __name__ == "__main__":
    main(int(sys.argv[1]))

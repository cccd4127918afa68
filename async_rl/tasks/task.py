"""The contract of a task: instances by number, and a verifier that scores a completion.

A task is a pure description: the node asks it for an instance and renders it, and a scoring worker in another process
asks *its* copy of the task for the same instance and scores the completion. So both must come out the same from
(split, instance id) alone, in any process, at any time.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from async_rl.config import Section
from async_rl.errors import AsyncRLError

Split = Literal["train", "eval"]


class TaskError(AsyncRLError):
    """A task that cannot do what was asked of it; the message names the task and what to do."""


class Instance(NamedTuple):
    """One question. Exactly one of `prompt` (plain text to continue) and `messages` (for a chat template) is set.

    `answer` is a right answer (what supervised learning would show), `data` whatever else the verifier needs to
    know; both are made of what msgpack can carry."""

    prompt: str | None
    messages: tuple[dict[str, str], ...] | None
    answer: Any
    data: Any = None


class Score(NamedTuple):
    """The verdict on one completion: a finite reward, and what it is made of, by name, for the metrics."""

    reward: float
    components: dict[str, float]


class Task(Protocol):
    """What `load_task` returns. A task class also has `Config`, a Section with the keys it takes from [task] besides
    `kind`, and is made from one: `TaskClass(config)`."""

    Config: ClassVar[type[Section]]

    def size(self, split: Split) -> int | None:
        """How many instances the split has; None when there is no end to them."""

    def instance(self, split: Split, instance: int) -> Instance:
        """Instance number `instance` ≥ 0 (below the size, where there is one): a pure function of its arguments and
        the task's config. Training and evaluation share none."""

    def score(self, instance: Instance, completion: str) -> Score:
        """Judge a decoded completion. What it raises is a failed environment, never a reward of 0.

        A task whose score comes from [[task.reward]] tables has them as an attribute `rewards` (async_rl.rewards), by
        which scoring knows how many completions may be scored at once, and how long that may take. One that has to read
        its data up to an instance says so by an attribute `reads_forward`: then that has a limit of its own."""


def instance_of(task: Task, split: Split, instance: int) -> Instance:
    """The instance that a lease's instance id means: a finite split is gone through again from its start."""
    size = task.size(split)
    if size == 0:
        raise TaskError(f"the task has no {split} instances: name some in [task], or ask for none")
    return task.instance(split, instance if size is None else instance % size)

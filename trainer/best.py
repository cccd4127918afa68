"""The best version so far, kept in adapters/best: a copy for people, as adapters/final is one.

What is evaluated is written beside it first, as a candidate, since the weights will have moved on when the result
comes; the result renames it, or deletes it. So there is a whole folder at any moment, or none.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from async_rl.run.metrics import Record
from async_rl.version import PolicyId
from trainer.checkpoint import finish_replacing, put_in_place, sync

log = logging.getLogger("learner")

BEST = "best"
CANDIDATE = "candidate-"
PARTIAL = ".partial-"
SCORE_FILE = "evaluation.json"


class Score(msgspec.Struct, frozen=True):
    """What a policy got, on the set of this name; beside the weights, in SCORE_FILE."""

    version: int
    digest: str
    set: str
    reward: float
    n: int


def is_better(new: Score, old: Score | None) -> bool:
    """By the mean reward; of equals the earlier version. Scores on another set do not count."""
    if old is None or old.set != new.set:
        return True
    return (new.reward, -new.version) > (old.reward, -old.version)


class Best:
    """By the set `by`; empty: nothing is kept. `write` makes a folder of the weights as they are."""

    def __init__(self, folder: Path, by: str, write: Callable[[Path], None], pending: Iterable[PolicyId]) -> None:
        self._folder = folder
        self._by = by
        self._write = write
        finish_replacing(folder)
        waiting = {self._candidate(policy) for policy in pending}
        for left in (*folder.glob(f"{CANDIDATE}*"), *folder.glob(f"{PARTIAL}*")):
            if left not in waiting:
                shutil.rmtree(left)
        self.score = read_score(folder / BEST)

    def candidate(self, policy: PolicyId) -> None:
        """The weights are this policy's, and it is about to be evaluated."""
        place = self._candidate(policy)
        if not self._by or place.exists() or (self.score and self.score.digest == policy.digest):
            return
        partial = self._folder / f"{PARTIAL}{place.name}"
        shutil.rmtree(partial, ignore_errors=True)
        self._write(partial)
        sync(partial)
        partial.rename(place)

    def judge(self, policy: PolicyId, record: Record) -> None:
        """What came of an evaluation. A part of the set is no measure: it may have been the easy part."""
        if not self._by or record["set"] != self._by:
            return
        place = self._candidate(policy)
        score = Score(policy.version, policy.digest, self._by, float(record["reward"]), int(record["n"]))
        if record["cancelled"]:
            log.warning("version %d is not compared with the best: its evaluation is not whole", policy.version)
        elif is_better(score, self.score) and place.exists():
            (place / SCORE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(score)))
            sync(place)
            put_in_place(place, self._folder / BEST)
            self.score = score
        shutil.rmtree(place, ignore_errors=True)

    def summary(self) -> dict[str, Any] | None:
        """For summary.json."""
        return msgspec.to_builtins(self.score) if self.score is not None else None

    def _candidate(self, policy: PolicyId) -> Path:
        return self._folder / f"{CANDIDATE}{policy.version}-{policy.digest[:16]}"


def read_score(folder: Path) -> Score | None:
    """Of a folder that `Best` has kept; None where there is none."""
    try:
        return msgspec.json.decode((folder / SCORE_FILE).read_bytes(), type=Score)
    except (FileNotFoundError, msgspec.DecodeError):
        return None

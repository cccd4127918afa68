"""A backend of several ranks that computes next to nothing, and the processes that are its ranks.

    python -P small_rank.py --config FILE …         a follower, as `trainer.ranks.leader` starts it
    python -P small_rank.py lead FOLDER CASE        rank 0: does what CASE says (CASES), and prints what came of it
    python -P small_rank.py unwatched FOLDER        a process whose watch over its ranks fails

What happens in a step is said by its rate: see `SmallBackend.step`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from async_rl.config import Config, ModelConfig, RunConfig, TrainerConfig
from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from trainer.backend import Sample, StepResult
from trainer.canary import Canary
from trainer.push_sizes import PushSizes
from trainer.ranks import children, follower
from trainer.ranks.children import Children
from trainer.ranks.leader import LeadBackend, leading
from trainer.ranks.place import Place

WORLD = 3
VERY_LONG_S = 600.0  # longer than any test waits for what has to end before
FINE, NOT_FINITE, ONE_RANK_FAILS, ONE_RANK_DIES, NEVER_ENDS, ONE_RANK_REFUSES, ONE_RANK_RAISES, ALL_RAISE = range(8)
CONFIG = Config(
    run=RunConfig(work_timeout=100.0),
    model=ModelConfig(path="none"),
    trainer=TrainerConfig(backend="megatron", parallel=ParallelConfig(data=WORLD)),
    task={"kind": "digit_sort"},
)


class SmallBackend:
    """`trainer.backend.Backend`, as far as the tests go."""

    vocabulary_size = 7
    modules = ("a.b",)
    publishes_canary = True
    push_sizes = PushSizes(2, 1)

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.folder = folder
        if (folder / "refuses").exists():
            raise AsyncRLError("no such model")

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        if rate == NOT_FINITE:
            raise FloatingPointError("a loss that is not finite")
        if rate == ONE_RANK_FAILS and self.place.rank == 1:
            raise ValueError("out of memory, say")
        if rate == ONE_RANK_REFUSES and self.place.rank == 2:
            raise AsyncRLError("its disk is full")
        if rate == ALL_RAISE or (rate == ONE_RANK_RAISES and self.place.rank == 1):
            raise ValueError("attempt 7 cannot be trained")
        if rate == ONE_RANK_DIES and self.place.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rate == NEVER_ENDS:
            (self.folder / f"in-step-{self.place.rank}").write_text(str(os.getpid()))
            time.sleep(VERY_LONG_S)
        total = torch.tensor(float(samples[0].tokens.sum()) + self.place.rank, dtype=torch.float64)
        if rate not in (ONE_RANK_REFUSES, ONE_RANK_RAISES):
            dist.all_reduce(total)
        return StepResult({"total": float(total)}, [samples[0].behaviour * 2], False)

    def observe(self, divergence: float) -> None:
        pass

    def reference(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        return [sample.behaviour for sample in samples]

    def logprobs(
        self, tokens: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        return [np.full(len(row) - 1, temperature, np.float32) for row in tokens]

    def export(self, path: Path) -> str:
        path.with_name(f"{path.name}-{self.place.rank}").touch()
        return "d1"

    def export_whole(self, path: Path) -> str:
        return "d2"

    def canary(self, path: Path, seed: int, tokens: Sequence[npt.NDArray[np.int32]]) -> Canary:
        return Canary(f"d{seed}", [], [])

    def export_final(self, folder: Path) -> None:
        self.save(folder)

    def save(self, folder: Path) -> None:
        (folder / f"shard-{self.place.rank}").write_text(str(os.getpid()))

    def load(self, folder: Path) -> None:
        if not (folder / f"shard-{self.place.rank}").exists():
            raise AsyncRLError("no such checkpoint")


def a_sample() -> Sample:
    tokens = np.arange(4, dtype=np.int32)
    zeros = np.zeros(4, np.float32)
    routes = np.full((4, 2, 2), -1, np.int16)
    return Sample(tokens, zeros + 0.5, np.array([1, 0, 0, 0], np.uint8), tokens * 0, 0.25, 3, 1, None, routes)


def everything(backend: LeadBackend, folder: Path) -> None:
    print(backend.vocabulary_size, backend.modules, backend.publishes_canary, tuple(backend.push_sizes))
    result = backend.step([a_sample()], FINE)
    print(result.metrics["total"], result.proximal[0].tolist(), result.skipped)
    print(backend.reference([a_sample()])[0].tolist(), backend.logprobs([a_sample().tokens], 0.5)[0].tolist())
    print(backend.export(folder / "e"), backend.export_whole(folder / "e"), backend.canary(folder / "e", 5, []).digest)
    try:
        backend.load(folder)
    except AsyncRLError as error:
        print(f"{type(error).__name__}: {error}")
    backend.save(folder)
    backend.load(folder)
    try:
        backend.step([a_sample()], NOT_FINITE)
    except FloatingPointError as error:
        print(f"{type(error).__name__}: {error}")
    try:
        backend.step([a_sample()], ONE_RANK_REFUSES)
    except AsyncRLError as error:
        print(f"{type(error).__name__}: {error}")
    print(backend.step([a_sample()], FINE).metrics["total"])


def idles(backend: LeadBackend, folder: Path) -> None:
    backend.save(folder)
    (folder / "idle").touch()
    time.sleep(VERY_LONG_S)


def looks_for_stopped(backend: LeadBackend, folder: Path) -> None:
    children.STOPPED_S = 0.5
    idles(backend, folder)


def steps(rate: int) -> Callable[[LeadBackend, Path], None]:
    def step(backend: LeadBackend, folder: Path) -> None:
        backend.save(folder)
        backend.step([a_sample()], rate)

    return step


def tells(rate: int) -> Callable[[LeadBackend, Path], None]:
    """Fails of a step, and takes its time to tell others, as a learner does."""

    def step(backend: LeadBackend, folder: Path) -> None:
        try:
            backend.step([a_sample()], rate)
        finally:
            time.sleep(2.5)
            print("told the others", flush=True)

    return step


CASES: dict[str, Callable[[LeadBackend, Path], None]] = {
    "everything": everything,
    "idles": idles,
    "idles, and looks for stopped ones": looks_for_stopped,
    "one fails": steps(ONE_RANK_FAILS),
    "one dies": steps(ONE_RANK_DIES),
    "hangs": steps(NEVER_ENDS),
    "one raises": tells(ONE_RANK_RAISES),
    "all raise": tells(ALL_RAISE),
}


def lead(folder: Path, case: str) -> None:
    def build(place: Place) -> Any:
        return SmallBackend(place, folder)

    with leading(CONFIG, folder, build, folder, "trainer", follower=__file__) as backend:
        CASES[case](backend, folder)
    print("done")


def unwatched(folder: Path) -> None:
    def failure() -> str:
        raise KeyError("what")

    Children([], "trainer", None, folder).watch(failure)
    time.sleep(VERY_LONG_S)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "lead":
        lead(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "unwatched":
        unwatched(Path(sys.argv[2]))
    else:
        follower.main(lambda _config, folder: lambda place: SmallBackend(place, folder))

"""Rank 0 of several: a trainer backend whose every call all ranks make at once."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from async_rl.config import Config, config_table
from trainer.backend import Backend, Sample, StepResult
from trainer.canary import Canary
from trainer.push_sizes import PushSizes
from trainer.ranks.calls import (
    Call,
    Computed,
    End,
    Export,
    ExportFinal,
    ExportWhole,
    Load,
    Logprobs,
    MakeCanary,
    Reference,
    Save,
    Step,
    encode,
)
from trainer.ranks.channel import Channel, Lost, failure_in
from trainer.ranks.children import Children
from trainer.ranks.place import Place, check_world, first_place

FOLLOWER = "trainer.ranks.follower"
MEETING = ".ranks-"
STORE_S = 1.0  # between looks at what a rank may have failed of

log = logging.getLogger("trainer")

Build = Callable[[Place], Backend]


class LeadBackend:
    """`trainer.backend.Backend`, for the learner, which knows nothing of ranks. Errors are those of `Channel.together`;
    a rank that is lost ends the process (`Children`)."""

    def __init__(self, channel: Channel, children: Children, build: Callable[[], Backend]) -> None:
        self._channel = channel
        self._children = children
        self._own = self._together(build)

    @property
    def vocabulary_size(self) -> int:
        return self._own.vocabulary_size

    @property
    def modules(self) -> tuple[str, ...]:
        return self._own.modules

    @property
    def publishes_canary(self) -> bool:
        return self._own.publishes_canary

    @property
    def push_sizes(self) -> PushSizes:
        return self._own.push_sizes

    def step(self, samples: Sequence[Sample], rate: float) -> StepResult:
        result: StepResult = self._everywhere(Step(list(samples), rate))
        return result

    def observe(self, divergence: float) -> None:
        """Only step control would want to know, which no backend of several ranks has."""
        self._own.observe(divergence)

    def reference(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        logprobs: list[npt.NDArray[np.float32]] = self._everywhere(Reference(list(samples)))
        return logprobs

    def logprobs(
        self, tokens: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        logprobs: list[npt.NDArray[np.float32]] = self._everywhere(Logprobs(list(tokens), temperature))
        return logprobs

    def export(self, path: Path) -> str:
        return str(self._everywhere(Export(path.resolve())))

    def export_whole(self, path: Path) -> str:
        return str(self._everywhere(ExportWhole(path.resolve())))

    def canary(self, path: Path, seed: int, tokens: Sequence[npt.NDArray[np.int32]]) -> Canary:
        canary: Canary = self._everywhere(MakeCanary(path.resolve(), seed, list(tokens)))
        return canary

    def export_final(self, folder: Path) -> None:
        self._everywhere(ExportFinal(folder.resolve()))

    def save(self, folder: Path) -> None:
        """All ranks write into the same folder."""
        self._everywhere(Save(folder.resolve()))

    def load(self, folder: Path) -> None:
        self._everywhere(Load(folder.resolve()))

    def end(self) -> None:
        """The others end."""
        self._tell(End())

    def _everywhere(self, call: Computed) -> Any:
        self._tell(call)
        return self._together(lambda: call.run(self._own))

    def _tell(self, call: Call) -> None:
        try:
            self._channel.tell(encode(call))
        except Lost as lost:
            self._children.lost(lost)

    def _together(self, work: Callable[[], Any]) -> Any:
        try:
            return self._channel.together(work)
        except Lost as lost:
            self._children.lost(lost)


@contextmanager
def leading(
    config: Config, model_path: Path, build: Build, logs: Path | None, name: str, follower: str = FOLLOWER
) -> Iterator[LeadBackend]:
    """The ranks of [trainer.parallel] as one backend: this process is rank 0, and starts the others on this machine as
    the module or file `follower`, unless torchrun has. They log to `logs`/NAME-rankN.log, or to the terminal. `build`
    makes the backend of this rank, `follower` knows that of its own. Raises AsyncRLError."""
    with _meeting_place(logs) as folder:
        place = first_place(config.trainer.parallel.ranks, folder / "meeting")
        check_world(place, config.trainer.parallel)
        lines = []
        if place.meeting is not None:
            path = folder / "config.toml"
            path.write_text(tomli_w.dumps(config_table(config)), encoding="utf-8")
            others = [place._replace(rank=rank, local=rank) for rank in range(1, place.world)]
            lines = [_line(follower, path, model_path, f"{name}-rank{other.rank}", other) for other in others]
        children = Children(lines, name, logs, folder)
        try:
            yield from _lead(config, place, children, build)
        finally:
            children.kill()


@contextmanager
def _meeting_place(logs: Path | None) -> Iterator[Path]:
    """A folder of this process's life: in the run's directory, where what a killed one left is taken away, too."""
    run = logs.parent if logs is not None else None
    for left in run.glob(f"{MEETING}*") if run is not None else ():
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=MEETING, dir=run) as folder:
        yield Path(folder)


def _lead(config: Config, place: Place, children: Children, build: Build) -> Iterator[LeadBackend]:
    failures = _FailureWatch()
    children.watch(failures.words)
    try:
        channel = Channel(place, config)
    except Lost as lost:
        children.lost(lost)
    failures.store = channel.store_to_watch()
    backend = LeadBackend(channel, children, lambda: build(place))
    log.info("%d ranks compute together", place.world)
    yield backend
    backend.end()
    children.end()
    channel.close()


class _FailureWatch:
    """What a rank says that it failed of, asked for once a second: the store may be a file."""

    def __init__(self) -> None:
        self.store: Any = None
        self._asked = 0.0
        self._words = ""

    def words(self) -> str:
        if self.store is not None and time.monotonic() - self._asked > STORE_S:
            self._asked = time.monotonic()
            failure = failure_in(self.store)
            self._words = failure.words() if failure else ""
        return self._words


def _line(follower: str, config_path: Path, model_path: Path, name: str, place: Place) -> list[str]:
    program = [follower] if follower.endswith(".py") else ["-m", follower]
    return [
        *program, "--config", str(config_path), "--model", str(model_path), "--name", name,
        "--rank", str(place.rank), "--world", str(place.world), "--meeting", str(place.meeting),
    ]  # fmt: skip

"""Where the numbers of steps and evaluations go besides metrics.jsonl: TensorBoard, Weights & Biases (run.trackers).

metrics.jsonl has to be written: without it the run fails. Whoever listens beside it may fail, at any time: the log
says so once, and the run goes on without.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from async_rl.config import config_table
from async_rl.eval_config import DEFAULT_SET
from async_rl.run.checks import check_trackers
from async_rl.run.metrics import MetricsWriter, Record, eval_numbers, eval_sets_of
from async_rl.run.process import PoolContext

log = logging.getLogger("trackers")

FLUSH_EVERY_S = 1.0  # what a killed trainer may lose of an event file; a flush of it is an fsync
WANDB_START_S = 30.0  # to reach the server, or be given up
WANDB_END_S = 30.0  # to send what is left; later `wandb sync` can still do it
NO_STEP = ("step", "version", "eval", "evals")  # keys of a step's record that are no measurement of the step


class RecordWriter(Protocol):
    def write(self, record: Record) -> None: ...


class Listener(Protocol):
    """`write` gets every record. `close` comes once, at the end, with whether the run failed."""

    @property
    def name(self) -> str: ...

    def write(self, record: Record) -> None: ...

    def close(self, failed: bool) -> None: ...


class Records:
    """metrics.jsonl and its listeners: a context manager that closes them."""

    def __init__(self, file: MetricsWriter, listeners: Sequence[Listener]) -> None:
        self._file = file
        self._listeners = list(listeners)

    def listen(self, listener: Listener) -> None:
        """From the next record on."""
        self._listeners.append(listener)

    def write(self, record: Record) -> None:
        self._file.write(record)
        for listener in list(self._listeners):
            if not _survives(listener.name, listener.write, record):
                self._listeners.remove(listener)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for listener in self._listeners:
            _survives(listener.name, listener.close, kind is not None)


def open_trackers(context: PoolContext, version: int) -> list[Listener]:
    """What run.trackers names; `version` is the one that training starts from. Raises AsyncRLError for a package that
    is not installed; a tracker that cannot start is logged and left out."""
    check_trackers(context.config)
    makers: dict[str, Callable[[], Listener]] = {
        "tensorboard": lambda: TensorBoard(context.directory.path / "tensorboard", version),
        "wandb": lambda: WeightsAndBiases(context),
    }
    opened: list[Listener] = []
    for name in dict.fromkeys(context.config.run.trackers):
        _survives(name, lambda make=makers[name]: opened.append(make()))
    return opened


class TensorBoard:
    """Event files, written in the caller's thread: a writer behind a queue would keep the trainer waiting for ever once
    it had died. The axis is the policy version: that a step made, that an evaluation was of."""

    name = "tensorboard"

    def __init__(self, folder: Path, version: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{version:08}")
        self._flushed = 0.0
        if version:  # what an earlier session wrote of later versions, which are made again now, is hidden
            session = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(session_log=session, step=version + 1, wall_time=time.time()))

    def write(self, record: Record) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for version, scalars in tracked(record):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            self._writer.write_event(Event(summary=Summary(value=values), step=version, wall_time=time.time()))
        if time.monotonic() - self._flushed >= FLUSH_EVERY_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run for the whole life of a run directory, resumes included. Whether it goes to a server is W&B's own
    business (WANDB_MODE, its login), as is the key, which never passes through here."""

    name = "wandb"

    def __init__(self, context: PoolContext) -> None:
        import wandb

        logging.getLogger("wandb").propagate = False  # it has a log of its own, and would fill the trainer's
        config, directory = context.config, context.directory
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, init_timeout=WANDB_START_S
        )
        self._run = wandb.init(
            project=config.run.name or "async-rl", id=directory.run_id, name=directory.path.name, resume="allow",
            dir=str(directory.path), config=config_table(config), settings=settings,
        )  # fmt: skip
        # W&B's own step may only rise; an evaluation ends when later versions have been made.
        self._run.define_metric("*", step_metric="version")

    def write(self, record: Record) -> None:
        for version, scalars in tracked(record):
            self._run.log({**scalars, "version": version})

    def close(self, failed: bool) -> None:
        """In a thread: a server that does not answer must not keep a run from ending."""
        ending = threading.Thread(target=self._run.finish, args=(int(failed),), name="wandb-finish", daemon=True)
        ending.start()
        ending.join(WANDB_END_S)
        if ending.is_alive():
            raise TimeoutError(f"not everything was sent within {WANDB_END_S:g} s; `wandb sync` sends the rest")


# --- what they are told ----------------------------------------------------------------------------------------------


def tracked(record: Record) -> Iterator[tuple[int, dict[str, float]]]:
    """What of a record is tracked: (version, numbers by tag). A step's numbers are under train/, those of its tables
    and lists under their own names; an evaluation's under eval/, or eval/NAME/ of a set with
    a name of its own. What is not finite is left out."""
    if "reward" in record:
        yield int(record["version"]), dict(_step_numbers(record))
    for name, evaluations in eval_sets_of([record]).items():
        place = "eval" if name == DEFAULT_SET else f"eval/{name}"
        for evaluation in evaluations:
            numbers = {f"{place}/{key}": float(value) for key, value in eval_numbers(evaluation).items()}
            yield int(evaluation["version"]), {tag: value for tag, value in numbers.items() if _is_number(value)}


def _step_numbers(record: Record) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if key in NO_STEP:
            continue
        if _is_number(value):
            yield f"train/{key}", float(value)
        elif isinstance(value, Mapping | list):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from ((f"{key}/{name}", float(item)) for name, item in items if _is_number(item))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _survives(name: str, call: Callable[..., object], *arguments: object) -> bool:
    """Whether it went well; else the log says how it failed, without the key should those words hold it."""
    try:
        call(*arguments)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        key = os.environ.get("WANDB_API_KEY")
        log.error("%s is given up, the run goes on without it: %s", name, words.replace(key, "…") if key else words)
        return False
    return True

"""What the learner is at between two steps, beside the backend's weights: in each checkpoint, and back from it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.wire.messages import EvalRequest, Progress
from trainer.backend import Backend
from trainer.checkpoint import find_latest
from trainer.records import Seen

log = logging.getLogger("learner")


class State(msgspec.Struct):
    """What a checkpoint keeps beside the backend's own files. `progress` is for the case that the buffer's journal is
    lost, `more_progress` that of the buffer's other shards; `evaluating` has not been reported yet, and is asked for
    again; `seen` was recorded of the buffer's view."""

    version: int = 0
    digest: str = ""
    elapsed_s: float = 0.0
    progress: Progress | None = None
    more_progress: tuple[Progress, ...] = ()
    evaluating: tuple[EvalRequest, ...] = ()
    seen: Seen = Seen()


def progress_of(state: State, shard: int, shards: int) -> Progress | None:
    """What a shard of the buffer, of so many, takes up if its journal is lost. Raises AsyncRLError when the checkpoint
    is of a run with more or fewer."""
    if state.progress is None:
        return None
    progress = (state.progress, *state.more_progress)
    if len(progress) != shards:
        raise AsyncRLError(
            f"the checkpoint is of a run with buffer.shards = {len(progress)}, and there are {shards} now, which "
            f"cannot take up its tickets: resume with buffer.shards = {len(progress)}, or begin a new run"
        )
    return progress[shard]


def resume(checkpoints: Path, backend: Backend) -> State:
    """The newest whole checkpoint, loaded; a fresh state when there is none yet."""
    found = find_latest(checkpoints)
    if found is None:
        log.info("no checkpoint in %s: starting from version 0", checkpoints)
        return State()
    for skipped in found.skipped:
        log.warning("skipped: %s", skipped)
    backend.load(found.folder)
    log.info("resuming from version %d", found.version)
    return msgspec.convert(found.state, State, str_keys=True)

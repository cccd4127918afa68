"""`async-rl scale inference=N`: more or fewer inference nodes in a run that goes on.

The run's launcher is asked (see `scaling`), and this waits until the buffer has the new nodes at work, and those that
leave have handed over what they had begun.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.run.directory import RunDirectory
from async_rl.run.launch import last_line
from async_rl.run.scaling import ANSWER, REQUEST, ScaleAnswer, ScaleError, ScaleRequest, write_message
from async_rl.run.view import StatusFeed
from async_rl.wire.messages import Status

ANSWER_S = 20.0  # a launcher looks ten times a second, but may be in the middle of starting something
POLL_S = 0.2
POOL = "inference"


def parse_size(text: str) -> ScaleRequest:
    """`inference=N`, or `inference.GROUP=N`. Raises ScaleError."""
    target, equals, count = text.partition("=")
    pool, _, group = target.partition(".")
    if not equals or pool != POOL or target.endswith(".") or not count.isdecimal():
        raise ScaleError(f"{text!r}: expected inference=N, or inference.GROUP=N with [[inference.group]]")
    return ScaleRequest(group, int(count))


def scale(place: Path, request: ScaleRequest, timeout_s: float, say: Callable[[str], None]) -> None:
    """Returns when the pool is as it should be. Raises ScaleError: nobody to ask, refused, or not done within
    `timeout_s`."""
    directory = RunDirectory.open(place)
    answer = _ask(directory, request)
    if answer.error:
        raise ScaleError(answer.error)
    if not answer.started and not answer.dismissed:
        say(f"there are {answer.before} nodes already")
        return
    happens = [("started", answer.started), ("told to leave", answer.dismissed)]
    say("; ".join(f"{what}: {', '.join(names)}" for what, names in happens if names))
    started = time.monotonic()
    _await_nodes(directory, answer, started + timeout_s)
    say(f"{request.nodes} nodes, {answer.before} before; it took {time.monotonic() - started:.1f} s")


def _ask(directory: RunDirectory, request: ScaleRequest) -> ScaleAnswer:
    folder = directory.requests
    if not directory.is_held():
        raise ScaleError(f"{directory.path}: this run is not going on: start it with [inference] nodes = N")
    if not folder.is_dir():
        raise ScaleError(
            f"{directory.path}: no `async-rl run` is in charge of this run's nodes (it is starting or ending, or the "
            "pools were started by hand: then start nodes with `async-rl infer`, and end some with `async-rl drain`)"
        )
    asked = folder / f"{os.getpid()}-{time.monotonic_ns()}{REQUEST}"
    answered = asked.with_suffix(ANSWER)
    deadline = time.monotonic() + ANSWER_S
    try:
        write_message(asked, request)
        while not answered.exists():
            if time.monotonic() > deadline:
                raise ScaleError(f"{directory.path}: its launcher does not answer for {ANSWER_S:g} s: is it stopped?")
            time.sleep(POLL_S / 2)
        return msgspec.json.decode(answered.read_bytes(), type=ScaleAnswer)
    except OSError as error:
        raise ScaleError(f"{folder}: the run ended meanwhile, or it cannot be written ({error.strerror})") from error
    finally:
        for path in (asked, answered):
            path.unlink(missing_ok=True)


def _await_nodes(directory: RunDirectory, answer: ScaleAnswer, deadline: float) -> None:
    feed = StatusFeed(directory, f"scale-{os.getpid()}")
    try:
        while missing := _missing(answer, feed.latest):
            if not directory.requests.is_dir():
                raise ScaleError(f"{directory.path}: the run ended meanwhile")
            if time.monotonic() > deadline:
                raise ScaleError(_late(directory, missing))
            time.sleep(POLL_S)
    finally:
        feed.close()


def _missing(answer: ScaleAnswer, status: Status | None) -> dict[str, str]:
    """Who is not yet where it should be, and where it is: by a status that may be a second old, in which new nodes,
    whose names nobody had before, cannot be ready yet."""
    if status is None:
        return dict.fromkeys((*answer.started, *answer.dismissed), "unknown: the buffer does not answer")
    states = {node.name: node.state for node in status.nodes}
    coming = {name: states.get(name, "not there yet") for name in answer.started if states.get(name) != "ready"}
    return coming | {name: states[name] for name in answer.dismissed if name in states}


def _late(directory: RunDirectory, missing: dict[str, str]) -> str:
    """What each of them said last, which may be why."""
    lines = []
    for name, state in missing.items():
        said = last_line(directory.logs / f"{name}.log")
        lines.append(f"{name} is {state}" + (f" ({said})" if said else ""))
    return f"it takes longer than was to be waited for, and goes on: {'; '.join(lines)}; logs: {directory.logs}"

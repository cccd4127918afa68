"""How many inference nodes a run has, while it goes on: the rule, and the launcher's side of `async-rl scale`.

The command leaves a request as a file in DIR/requests, and the launcher, which looks there all the time, answers with
another beside it: a folder rather than a socket, as everything about a run lies in its directory, whose owner alone may
ask. It is there as long as a launcher that answers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from async_rl.config import Config, check_config
from async_rl.errors import AsyncRLError
from async_rl.inference_config import NodeGroup, node_groups, with_nodes
from async_rl.run.launch import ProcessSpec
from async_rl.run.pools import Pools

REQUEST, ANSWER = ".request", ".answer"
MAX_REQUEST_BYTES = 4096


class ScaleError(AsyncRLError):
    """The pool cannot have that size; the message says why, and what it may have."""


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many nodes are to be there; `group` is empty where the config names none."""

    group: str
    nodes: int


class ScaleAnswer(msgspec.Struct, frozen=True):
    """`error` is empty, or why nothing was done; else which nodes are started and which are told to leave, and how many
    there were before."""

    error: str = ""
    before: int = 0
    started: tuple[str, ...] = ()
    dismissed: tuple[str, ...] = ()


class Change(NamedTuple):
    start: tuple[str, ...]
    dismiss: tuple[str, ...]


def change(present: Sequence[str], wanted: int, prefix: str, next_index: int) -> Change:
    """From the nodes of a group that are there, oldest first, to `wanted` of them: the newest leave, since they have
    begun the least, and new ones get numbers that no node has had."""
    if wanted >= len(present):
        return Change(tuple(f"{prefix}-{next_index + i}" for i in range(wanted - len(present))), ())
    return Change((), tuple(reversed(present[wanted:])))


class Sizes:
    """The sizes of a run's groups of nodes, by what its launcher starts and dismisses; `plan` makes a node's spec."""

    def __init__(self, pools: Pools, config: Config, plan: Callable[[str, NodeGroup], ProcessSpec]) -> None:
        self._pools = pools
        self._config = config
        self._plan = plan
        self._groups = {group.name: group for group in node_groups(config.inference)}
        self._group_of = {name: group.name for group in self._groups.values() for name in group.node_names}
        self._next = {group.name: group.inference.nodes for group in self._groups.values()}

    def present(self, group: str) -> list[str]:
        return [name for name in self._pools.present() if self._group_of.get(name) == group]

    def resize(self, group: str, nodes: int) -> ScaleAnswer:
        """Raises ScaleError, and nothing has changed then."""
        if group not in self._groups:
            raise ScaleError(_no_such_group(group, list(self._groups)))
        self._check(group, nodes)
        present = self.present(group)
        start, dismiss = change(present, nodes, group or "node", self._next[group])
        for name in start:
            self._next[group] += 1
            self._group_of[name] = group
            self._pools.add(self._plan(name, self._groups[group]))
        for name in dismiss:
            self._pools.dismiss(name)
        return ScaleAnswer(before=len(present), started=start, dismissed=dismiss)

    def _check(self, group: str, nodes: int) -> None:
        if not self._pools.goes_on:
            raise ScaleError("the run is about to end: nothing is started any more")
        if nodes < 1:
            raise ScaleError(f"{nodes} nodes cannot go on with a run: at least 1, or end it with Ctrl-C, and --resume")
        try:
            inference = with_nodes(self._config.inference, group, nodes)
            check_config(msgspec.structs.replace(self._config, inference=inference))
        except AsyncRLError as error:
            raise ScaleError(str(error)) from error


def _no_such_group(group: str, known: Sequence[str]) -> str:
    if known == [""]:
        return f"inference.{group}: this run has no [[inference.group]]: inference=N"
    which = f"there is no group {group!r}" if group else "its nodes are of different groups"
    return f"{which}: {' or '.join(f'inference.{name}=N' for name in known)}"


class Requests:
    """The folder in which a launcher is asked: made anew, and taken away at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # a killed launcher's
        folder.mkdir(mode=0o700)

    def serve(self, sizes: Sizes) -> None:
        """Answer whoever has asked. Does not wait."""
        for path in sorted(self._folder.glob(f"*{REQUEST}")):
            write_message(path.with_suffix(ANSWER), self._answer(path, sizes))
            path.unlink(missing_ok=True)

    def _answer(self, path: Path, sizes: Sizes) -> ScaleAnswer:
        try:
            with path.open("rb") as file:
                request = msgspec.json.decode(file.read(MAX_REQUEST_BYTES), type=ScaleRequest)
            return sizes.resize(request.group, request.nodes)
        except (AsyncRLError, OSError, msgspec.MsgspecError) as error:
            return ScaleAnswer(error=str(error))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def write_message(path: Path, message: msgspec.Struct) -> None:
    """Whole or not at all, and for nobody else to read."""
    partial = path.with_name(f".{path.name}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(message))
    partial.replace(path)

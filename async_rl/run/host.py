"""One process of a run on a machine that its launcher reaches through somebody else: what Ray's actor there does.

The process is the one that the local launcher would start, by the same function, and dies with the `Host` that started
it. A `Host` needs no Ray, and shares no files with the launcher: what the process says goes back in pieces, and a node
gets what it needs of the run directory (run.json, token, config, its keys) in a folder that is taken away afterwards.
What writes the run directory must have it where the launcher has it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import tomli_w

from async_rl.errors import AsyncRLError
from async_rl.run.launch import ProcessSpec, kill_group, spawn
from async_rl.run.scratch import Scratch
from async_rl.wire.security import with_host

PIECE_BYTES = 64 << 10  # of a log, in one answer: small enough that it is no object of Ray's store
POLL_S = 0.05
START_S = 60.0  # for fork and exec, on a machine that swaps
WAIT_S = 1.0
KEYS = "keys"  # the folder of a node's keys, in its own directory


class Order(NamedTuple):
    """What to start. `files` are those of the run directory `directory` that the process gets, by name; none where it
    shall work in that directory itself, which is that of `run`. `environment` is added to this machine's."""

    spec: ProcessSpec
    again: bool
    run: str
    directory: str
    files: Mapping[str, bytes] = {}
    environment: Mapping[str, str] = {}


class Started(NamedTuple):
    """Where the process is; with `error` there is none. `node` and `address` are whoever placed it's."""

    error: str
    hostname: str
    pid: int = 0
    node: str = ""
    address: str = ""


class Look(NamedTuple):
    """What came since the last look; `code` once it has ended and this is the last of it."""

    piece: bytes
    code: int | None


class Host:
    """One process, from its start to its end. Each method may be called from another thread."""

    def __init__(self) -> None:
        self.address = ""
        """Of this machine, for its peers; empty where nobody knows it."""
        self._scratch: Scratch | None = None
        self._log = Path()
        self._pid = 0
        self._code: int | None = None
        self._spawned = threading.Event()
        self._trouble = ""

    def start(self, order: Order) -> Started:
        """Returns once it runs. Raises nothing: what is wrong is in the answer."""
        try:
            self._scratch = Scratch()
            self._log = self._scratch.path / "log"
            spec = self._ready(order, self._scratch.path)
        except (AsyncRLError, OSError) as error:
            return self._cannot(str(error))
        # The kernel ends a child with the *thread* that started it, so that one lives as long as the child.
        thread = threading.Thread(target=self._live, args=(spec, order), name="child", daemon=True)
        thread.start()
        if not self._spawned.wait(START_S):
            return self._cannot(f"it does not start within {START_S:g} s")
        return self._cannot(self._trouble) if self._trouble else Started("", socket.gethostname(), self._pid)

    def free_port(self) -> int:
        """One that was free a moment ago, for ranks to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def look(self, offset: int, patience: float) -> Look:
        """The log from `offset` on; returns as soon as there is something, after `patience` seconds at the latest."""
        deadline = time.monotonic() + patience
        while True:
            code = self._code  # before the log is read: what was said before the end is in it then
            piece = self._read(offset)
            over = code is not None and len(piece) < PIECE_BYTES
            if piece or over or time.monotonic() > deadline:
                return Look(piece, code if over else None)
            time.sleep(POLL_S)

    def send_signal(self, number: int) -> None:
        if self._pid and self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def kill(self) -> None:
        """It and all that it started."""
        if self._pid and self._code is None:
            kill_group(self._pid)

    def close(self) -> None:
        """Nothing of it is left on this machine."""
        self.kill()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _cannot(self, why: str) -> Started:
        self.close()
        return Started(why, socket.gethostname())

    def _live(self, spec: ProcessSpec, order: Order) -> None:
        """The child's thread."""
        try:
            process = spawn(spec, self._log, order.again, order.environment)
        except Exception as error:  # an interpreter that is not there, or anything that fork and exec may say
            self._trouble = f"{spec.python or 'it'} cannot be started: {error}"
            self._spawned.set()
            return
        self._pid = process.pid
        self._spawned.set()
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=WAIT_S)
        kill_group(process.pid)  # what it left in its group
        self._code = process.returncode

    def _ready(self, order: Order, scratch: Path) -> ProcessSpec:
        """Its files are there, and its arguments lead to them. Raises AsyncRLError, OSError."""
        if not order.files:
            _check_run(Path(order.directory), order.run)
            return order.spec
        place = scratch / "run"
        for name, content in order.files.items():
            _write(place / name, content)
        (place / "logs").mkdir(mode=0o700)
        config = place / "config.toml"
        table = tomllib.loads(config.read_text())
        if (place / KEYS).is_dir():
            table["buffer"]["keys"] = str(place / KEYS)
        inference = table.get("inference", {})
        for nodes in (inference, *inference.get("group", ())):
            for key in {"relay_endpoint", "relay_address"} & nodes.keys() if self.address else ():
                nodes[key] = with_host(nodes[key], self.address)
        config.write_text(tomli_w.dumps(table))
        return replace(order.spec, arguments=_led(order.spec.arguments, config, place))

    def _read(self, offset: int) -> bytes:
        try:
            with self._log.open("rb") as file:
                file.seek(offset)
                return file.read(PIECE_BYTES)
        except OSError:
            return b""


def _check_run(directory: Path, run: str) -> None:
    """Whether the run's directory is here, too. Raises AsyncRLError."""
    try:
        found = json.loads((directory / "run.json").read_text())["run"]
    except (OSError, ValueError, LookupError, TypeError):
        found = ""
    if found != run:
        raise AsyncRLError(
            f"{directory} on {socket.gethostname()} is not the directory of this run ({run}): buffer, policy store and "
            "trainer need it there: put --out on a file system that this machine shares with the launcher's, or let "
            "the launcher's machine offer the resources that [launch.ray] services and trainer ask for"
        )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _led(arguments: Sequence[str], config: Path, place: Path) -> tuple[str, ...]:
    """--config and --dir with these values."""
    places = {"--config": str(config), "--dir": str(place)}
    return tuple(places.get(before, each) for before, each in zip(("", *arguments), arguments, strict=False))



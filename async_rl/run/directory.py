"""A run's directory: everything that a run makes, in one place, and where its services listen.

config.toml    as resolved; runs as it is
run.json       run id and endpoints, and in which folder the keys lie; never a key
token          0600: who can read it may join
metrics.jsonl  samples.jsonl  summary.json  report.html  learning_curve.png
locks/         which of buffer, policy store and trainer live
logs/  adapters/  checkpoints/  journal/  prometheus/  tensorboard/  wandb/
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from async_rl.config import Config, config_table, keys_folder
from async_rl.errors import AsyncRLError
from async_rl.shards import shard_name
from async_rl.wire.security import (
    check_endpoint,
    make_ipc_directory,
    new_token,
    read_token,
    shard_endpoint,
    write_token,
)

RUNS = Path("runs")
LATEST = "latest"
ALONE_S = 120.0  # a file server lets go of what a lost machine held after its lease, 90 s of NFS
ALONE_LOOK_S = 0.1

log = logging.getLogger("async_rl.directory")


class RunDirectoryError(AsyncRLError):
    """A directory that is no run, is taken, or cannot be written; the message names it."""


class RunDirectory:
    """An existing run directory. Make one with `create`, find one with `open`."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self._run = run

    @classmethod
    def create(cls, out: Path | None, config: Config, runs: Path = RUNS) -> RunDirectory:
        """Make the directory of a new run: `out`, or `runs`/<name of the config> with a number added when taken, and
        then `runs`/latest points at it. Raises RunDirectoryError when `out` holds something already."""
        _check_endpoints(config)
        try:
            path = _claim(out) if out is not None else _claim_numbered(runs, config.run.name)
            for folder in ("logs", "adapters", "checkpoints"):
                (path / folder).mkdir()
            run = {"run": secrets.token_hex(8), **_endpoints(config)}
            write_token(path / "token", new_token())
            _write(path / "run.json", json.dumps(run, indent=1) + "\n")
            directory = cls(path, run)
            directory.write_config(config)
            if out is None:
                _point_latest(runs, path)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot make the run directory {error.filename or out or runs}: {error.strerror}: choose another "
                "place with --out"
            ) from error
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Raises RunDirectoryError when `path` is not a run's directory."""
        try:
            run = json.loads((path / "run.json").read_text())
            if not {"run", "endpoint", "store_endpoint"} <= set(run):
                raise ValueError("keys are missing")
        except OSError as error:
            hint = _runs_beside(path)
            raise RunDirectoryError(f"{path} is not a run directory (no readable run.json){hint}") from error
        except ValueError as error:
            raise RunDirectoryError(f"{path / 'run.json'} is broken: {error}") from error
        return cls(path.resolve(), run)

    def reopen_endpoints(self, config: Config) -> None:
        """Before a resume: new sockets, as the last run's were taken away with it. The run id and token stay."""
        _check_endpoints(config)
        self.remove_sockets()
        self._run = {"run": self.run_id, **_endpoints(config)}
        _write(self.path / "run.json", json.dumps(self._run, indent=1) + "\n")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While services of this run live. Raises RunDirectoryError when another process holds it; the kernel lets go
        of it for one that was killed."""
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunDirectoryError(f"{self.path}: this run is going on: wait for its end, or end it") from error
            yield

    @contextmanager
    def alone(self, name: str, timeout_s: float = ALONE_S) -> Iterator[None]:
        """While the process of this name writes here. A launcher that was killed, or a machine that is only out of
        reach, may have left one that does so yet: it is waited for, and the kernel (over a network the file server)
        lets go of it when it is gone. Raises RunDirectoryError after `timeout_s`."""
        locks = self.path / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        with (locks / name).open("a") as file:
            told, deadline = False, time.monotonic() + timeout_s
            while not _locked(file.fileno()):
                if not told:
                    log.warning("waits for the end of another %s of this run, %g s at most", name, timeout_s)
                told = True
                if time.monotonic() > deadline:
                    raise RunDirectoryError(
                        f"{self.path}: another process of this run's {name} writes here for {timeout_s:g} s already, "
                        "left by a launcher that was killed or on a machine that was taken for lost: end it, then "
                        "--resume"
                    )
                time.sleep(ALONE_LOOK_S)
            yield

    def is_held(self) -> bool:
        """Whether services of this run live (on this machine)."""
        try:
            with self.hold():
                return False
        except RunDirectoryError:
            return True

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else False

    def write_config(self, config: Config) -> Path:
        _write(self.config_path, tomli_w.dumps(config_table(config)))
        return self.config_path

    def write_pool_config(self, name: str, config: Config) -> Path:
        """The config that one hand-started pool runs with (paths may differ between machines, and on another than the
        buffer's the directory may hold no more than run.json and token). Raises RunDirectoryError."""
        try:
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{self.logs} cannot be made: {error.strerror}") from error
        path = self.logs / f"{name}.toml"
        _write(path, tomli_w.dumps(config_table(config)))
        return path

    def remove_sockets(self, only_empty: bool = False) -> None:
        """Take away the directory of the ipc sockets; with `only_empty` only when no socket is left in it."""
        folder = self._run.get("sockets")
        if not folder:
            return
        if only_empty:
            try:
                os.rmdir(folder)
            except OSError:
                return  # gone, or another process still listens there and will do it
        else:
            shutil.rmtree(folder, ignore_errors=True)

    @cached_property
    def token(self) -> str:
        """Read from the file; raises an AsyncRLError when it cannot be."""
        return read_token(self.path / "token")

    @property
    def run_id(self) -> str:
        return str(self._run["run"])

    @property
    def endpoint(self) -> str:
        """Where the buffer listens, resolved."""
        return str(self._run["endpoint"])

    @property
    def endpoints(self) -> list[str]:
        """Where each shard of the buffer listens, resolved; `endpoint` is the first's."""
        return [self.endpoint, *map(str, self._run.get("more_endpoints", ()))]

    @property
    def store_endpoint(self) -> str:
        return str(self._run["store_endpoint"])

    @property
    def keys(self) -> Path | None:
        """Where the CURVE keys of its services lie on their machine; None without."""
        return Path(str(self._run["keys"])) if "keys" in self._run else None

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        """Some trajectories, to look at: a JSON object a line (trainer.records.sample_records)."""
        return self.path / "samples.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def curve_path(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def requests(self) -> Path:
        """Where the launcher is asked for another number of nodes, while there is one (see scaling)."""
        return self.path / "requests"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def journal(self) -> Path:
        """The buffer's: what it needs to go on where it was."""
        return self.path / "journal"

    def shard_journal(self, shard: int) -> Path:
        """Each shard has a journal of its own; the first one's is where the only one's would be."""
        return self.path / f"journal-{shard}" if shard else self.journal

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def _endpoints(config: Config) -> dict[str, Any]:
    """endpoint, more_endpoints (of the buffer's other shards, if any) and store_endpoint with "auto" and free ports
    resolved. "auto" is an ipc socket in a directory of the run's own (0700, and short: a socket's path may have about
    100 bytes), which is named too."""
    shards = [_with_port(shard_endpoint(config.buffer.endpoint, shard)) for shard in range(config.buffer.shards)]
    store = _with_port(config.buffer.store_endpoint)
    chosen: dict[str, Any] = {}
    if "auto" in (shards[0], store):
        folder = make_ipc_directory()
        chosen["sockets"] = str(folder)
        store = f"ipc://{folder / 'store'}" if store == "auto" else store
        if shards[0] == "auto":
            shards = [f"ipc://{folder / shard_name(shard)}" for shard in range(len(shards))]
    chosen |= {"endpoint": shards[0], "store_endpoint": store}
    if len(shards) > 1:
        chosen["more_endpoints"] = shards[1:]
    keys = keys_folder(config)
    return chosen | ({"keys": str(keys)} if keys is not None else {})


def _check_endpoints(config: Config) -> None:
    """Before anything is made."""
    shards = [shard_endpoint(config.buffer.endpoint, shard) for shard in range(config.buffer.shards)]
    explicit = [end for end in (*shards, config.buffer.store_endpoint) if end != "auto"]
    for endpoint in explicit:
        check_endpoint(endpoint, encrypted=bool(config.buffer.keys))
    fixed = [endpoint for endpoint in explicit if not endpoint.endswith(":*")]
    if len(set(fixed)) < len(fixed):
        if config.buffer.shards > 1:
            raise RunDirectoryError(
                f"[buffer] store_endpoint = {config.buffer.store_endpoint} is one of the {config.buffer.shards} ports "
                f"from {config.buffer.endpoint} on, where the buffer's shards listen: give it another"
            )
        raise RunDirectoryError(f"[buffer] endpoint and store_endpoint are both {fixed[0]}: give each its own")


def _with_port(endpoint: str) -> str:
    """`tcp://HOST:*` with a port that was free a moment ago: the other pools read from run.json where to dial."""
    if not endpoint.endswith(":*"):
        return endpoint
    host = endpoint.removeprefix("tcp://").removesuffix(":*")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind(("" if host == "*" else host.strip("[]"), 0))
        except OSError as error:
            raise RunDirectoryError(f"{endpoint}: no port is free at {host}: {error.strerror}: name one") from error
        return f"tcp://{host}:{probe.getsockname()[1]}"


def _claim(path: Path) -> Path:
    """An empty or new directory becomes this run's, readable by its owner alone."""
    if path.is_dir() and any(path.iterdir()):
        raise RunDirectoryError(
            f"--out {path}: there is something in it already: choose another, or go on with --resume"
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path.resolve()


def _claim_numbered(runs: Path, name: str) -> Path:
    """mkdir is what decides, so that two runs started at once never share a directory."""
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = runs / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path.resolve()


def _point_latest(runs: Path, path: Path) -> None:
    """Replaced in one step: a reader never finds the link missing."""
    fresh = runs / f".{LATEST}-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path.name)
    fresh.replace(runs / LATEST)


def _runs_beside(path: Path) -> str:
    parent = path.parent if path.name == LATEST else path
    found = sorted(folder.parent.name for folder in parent.glob("*/run.json") if folder.parent.name != LATEST)
    if found:
        return f"; runs in {parent}: {', '.join(found)}"
    return "; start one with `async-rl run CONFIG` or `async-rl buffer CONFIG`, or name it with --out"


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("nobody can tell whether another process writes here: %s", error.strerror)
    return True


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)

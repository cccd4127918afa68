"""The transport benchmark's buffer: the real service in a process of its own, and how its peers reach it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rl.config import Config, batch_bytes, config_from_table
from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import child_environment, last_line
from async_rl.version import PolicyId
from async_rl.wire.keys import dial_keys, make_keys
from async_rl.wire.link import Client, Received
from async_rl.wire.messages import Role, Status, StatusRequest
from buffer.bench_transport_arms import END_S, START_S, BenchError

FINGERPRINT = {"benchmark": "transport"}
GROUP_SIZE = 8
STEP_TOKENS, LEAST_GROUPS = 1 << 20, 32  # of a batch
STEPS = 1_000_000


def groups_per_step(tokens: int) -> int:
    """Of a batch of trajectories of so many tokens: 128 at 1,024, and so 1,024 trajectories."""
    return max(LEAST_GROUPS, STEP_TOKENS // (GROUP_SIZE * tokens))


def policy(version: int) -> PolicyId:
    return PolicyId("main", version, f"{version:064x}")


class House:
    """A run directory and the buffer's process in it."""

    def __init__(self, config: Config, folder: Path, journal: bool) -> None:
        self.config = config
        self.directory = RunDirectory.create(folder / "run", config)
        self.path = self.directory.path
        self._log = folder / "buffer.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "buffer.service" if journal else "buffer.bench_transport_service",
                    "--config", str(self.directory.config_path), "--dir", str(self.path), "--name", "buffer",
                ],
                env=child_environment(), stderr=log, stdout=log,
            )  # fmt: skip

    def check(self, because: AsyncRLError | None = None) -> None:
        """Raises BenchError when the buffer has ended, which then is the cause of any other error."""
        if self.process.poll() is not None:
            code, last = self.process.returncode, last_line(self._log)
            raise BenchError(f"the buffer ended with exit code {code}: {last}") from because

    def close(self) -> None:
        self.process.kill()
        self.process.wait(END_S)


@contextmanager
def house(tokens: int, max_staleness: int, journal: bool = False, curve: bool = False) -> Iterator[House]:
    """A buffer that has room for all that the bound admits."""
    folder = Path(tempfile.mkdtemp(prefix="async-rl-bench-"))
    if curve:
        make_keys(folder / "keys")
    table: dict[str, Any] = {
        "run": {"name": "bench", "steps": STEPS},
        "model": {"path": "unused"},
        "task": {"kind": "digit_sort"},
        "inference": {"max_context": tokens},
        "buffer": {
            "endpoint": "tcp://127.0.0.1:*", "store_endpoint": "tcp://127.0.0.1:*", "max_staleness": max_staleness,
            "groups_per_step": groups_per_step(tokens), "group_size": GROUP_SIZE, "capacity_bytes": 1 << 60,
            "fsync": "never", "keys": str(folder / "keys") if curve else "",
        },
    }  # fmt: skip
    config = config_from_table(table, "bench transport")
    room = {**table["buffer"], "capacity_bytes": (max_staleness + 2) * batch_bytes(config)}
    made = House(config_from_table({**table, "buffer": room}, "bench transport"), folder, journal)
    try:
        yield made
        made.check()
    except AsyncRLError as error:
        made.check(error)
        raise
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def dial(path: Path, role: Role, name: str) -> Client:
    directory = RunDirectory.open(path)
    keys = dial_keys(directory.keys, role)
    link = Client(
        directory.endpoint, run=directory.run_id, token=directory.token, role=role, name=name, peer="the buffer",
        keys=keys,
    )  # fmt: skip
    link.connect(START_S)
    return link


def receive(link: Client, kind: type) -> Received:
    while True:
        received = link.receive(START_S, kind.__name__)
        if isinstance(received.message, kind):
            return received


def ask_status(tool: Client) -> Status:
    tool.send(StatusRequest())
    status: Status = receive(tool, Status).message
    return status


def check_status(status: Status) -> None:
    """Every attempt is where it should be: nothing refused, dropped or outside the ledger."""
    dropped = sum(count for place, count in status.ledger.items() if place.startswith("dropped."))
    if dropped or status.outside:
        raise BenchError(f"the buffer lost or refused something: {status.ledger}, {status.outside}")

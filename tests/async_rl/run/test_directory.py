from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from async_rl.config import BufferConfig, Config, RunConfig, TinyModelConfig, load_config
from async_rl.errors import AsyncRLError
from async_rl.run.directory import RunDirectory, RunDirectoryError


def config(name: str = "example", **buffer: str) -> Config:
    base = Config(run=RunConfig(name=name), task={"kind": "digit_sort"}, buffer=BufferConfig(**buffer))
    return msgspec.structs.replace(base, model=msgspec.structs.replace(base.model, tiny=TinyModelConfig()))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_the_name_is_numbered_when_taken_and_latest_points_at_the_newest(runs: Path) -> None:
    first, second = (RunDirectory.create(None, config(), runs) for _ in range(2))
    assert (first.path.name, second.path.name) == ("example", "example-2")
    assert (runs / "latest").resolve() == second.path
    for directory in (first, second):
        directory.remove_sockets()


def test_what_was_created_is_what_is_opened(runs: Path) -> None:
    made = RunDirectory.create(None, config(), runs)
    found = RunDirectory.open(runs / "latest")
    assert (found.run_id, found.token, found.endpoint) == (made.run_id, made.token, made.endpoint)
    assert found.path == made.path
    assert load_config(str(found.config_path)) == config()
    made.remove_sockets()


def test_only_the_owner_can_enter_read_the_token_or_reach_the_sockets(runs: Path) -> None:
    directory = RunDirectory.create(None, config(), runs)
    sockets = Path(directory.endpoint.removeprefix("ipc://")).parent
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory.path, directory.path / "token", sockets)]
    assert [oct(mode) for mode in modes] == ["0o700", "0o600", "0o700"]
    directory.remove_sockets()
    assert not sockets.exists()


def test_sockets_in_use_stay_when_only_an_empty_directory_may_go(runs: Path) -> None:
    directory = RunDirectory.create(None, config(), runs)
    socket = Path(directory.endpoint.removeprefix("ipc://"))
    socket.touch()
    directory.remove_sockets(only_empty=True)
    assert socket.exists()
    socket.unlink()
    directory.remove_sockets(only_empty=True)
    assert not socket.parent.exists()


def test_explicit_endpoints_are_kept(tmp_path: Path) -> None:
    ends = {"endpoint": "tcp://127.0.0.1:5701", "store_endpoint": "tcp://127.0.0.1:5702"}
    directory = RunDirectory.create(tmp_path / "out", config(**ends))
    assert (directory.endpoint, directory.store_endpoint) == ("tcp://127.0.0.1:5701", "tcp://127.0.0.1:5702")


def test_any_free_port_is_a_number_in_the_run(tmp_path: Path) -> None:
    ends = {"endpoint": "tcp://127.0.0.1:*", "store_endpoint": "tcp://127.0.0.1:*"}
    directory = RunDirectory.create(tmp_path / "out", config(**ends))
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in (directory.endpoint, directory.store_endpoint)}
    assert len(ports) == 2
    assert min(ports) > 0


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ({"endpoint": "tcp://127.0.0.1:5701", "store_endpoint": "tcp://127.0.0.1:5701"}, "give each its own"),
        ({"endpoint": "tcp://0.0.0.0:5701"}, "0.0.0.0"),
    ],
)
def test_endpoints_that_cannot_work_are_refused_before_anything_is_made(
    ends: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AsyncRLError, match=message):
        RunDirectory.create(tmp_path / "out", config(**ends))
    assert not (tmp_path / "out").exists()


def test_a_directory_with_something_in_it_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(RunDirectoryError, match="choose another"):
        RunDirectory.create(tmp_path, config())


def test_a_directory_that_is_no_run_is_refused_with_the_runs_beside_it(runs: Path) -> None:
    directory = RunDirectory.create(None, config(), runs)
    with pytest.raises(RunDirectoryError, match=r"is not a run directory.*runs in .*: example"):
        RunDirectory.open(runs)
    directory.remove_sockets()


def test_a_run_is_held_by_one_process_at_a_time(runs: Path) -> None:
    directory = RunDirectory.create(None, config(), runs)
    with directory.hold():
        assert directory.is_held()
        with pytest.raises(RunDirectoryError, match="going on"), RunDirectory.open(directory.path).hold():
            pass
    assert not directory.is_held()
    directory.remove_sockets()


def test_going_on_with_a_run_keeps_its_identity_and_makes_new_sockets(runs: Path) -> None:
    directory = RunDirectory.create(None, config(), runs)
    before = (directory.run_id, directory.token, directory.endpoint)
    directory.reopen_endpoints(config())
    found = RunDirectory.open(directory.path)
    assert (found.run_id, found.token) == before[:2]
    assert found.endpoint != before[2]
    assert not Path(before[2].removeprefix("ipc://")).parent.exists()
    directory.remove_sockets()


def test_of_a_process_that_writes_here_there_is_one_and_the_next_waits_for_its_end(runs: Path) -> None:
    directory = RunDirectory.create(None, config(), runs)
    directory.remove_sockets()
    program = (
        "import sys, time; from pathlib import Path; from async_rl.run.directory import RunDirectory\n"
        "with RunDirectory.open(Path(sys.argv[1])).alone('buffer'): print('in', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(directory.path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    try:
        with (
            pytest.raises(RunDirectoryError, match=r"this run's buffer writes here for 0.2 s .* end it, then --resume"),
            directory.alone("buffer", 0.2),
        ):
            pass
        with directory.alone("store", 0.2):
            pass
        os.kill(other.pid, signal.SIGKILL)
        with directory.alone("buffer", 60):
            pass
    finally:
        other.kill()
        other.wait(60)

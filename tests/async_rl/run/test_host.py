"""What an actor does on its machine, with real processes and without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from gone import gone

from async_rl.run.host import PIECE_BYTES, Host, Order
from async_rl.run.launch import ProcessSpec
from async_rl.run.process import HOUSE_PLACE

FAKES = {
    "says": "import sys; print('x' * 100_000); print('error: no model'); sys.exit(3)",
    "sleeps": "import time; print('up', flush=True); time.sleep(600)",
    "shows": """
        import json, os, sys, time
        from pathlib import Path
        place = Path(sys.argv[sys.argv.index("--dir") + 1])
        files = {str(each.relative_to(place)): oct(each.stat().st_mode & 0o777)
                 for each in place.rglob("*") if each.is_file()}
        config = Path(sys.argv[sys.argv.index("--config") + 1]).read_text()
        print(json.dumps([sys.argv[1:], str(place), oct(place.parent.stat().st_mode & 0o777), files, config,
                          os.environ.get("MINE")]))
    """,
    "spawns": """
        import subprocess, sys, time
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(worker.pid, flush=True)
        time.sleep(600)
    """,
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    package = tmp_path / "path" / "fakehosts"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, source in FAKES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "path"), str(HOUSE_PLACE)]))
    made = Host()
    yield made
    made.close()


def order(name: str, directory: Path, *arguments: str, **settings: object) -> Order:
    return Order(ProcessSpec(name, f"fakehosts.{name}", arguments), False, "r1", str(directory), **settings)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    (made / "run.json").write_text(json.dumps({"run": "r1"}))
    return made


def everything(host: Host, timeout_s: float = 60) -> tuple[bytes, int]:
    said, deadline = b"", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        look = host.look(len(said), 0.5)
        assert len(look.piece) <= PIECE_BYTES
        said += look.piece
        if look.code is not None:
            return said, look.code
    raise AssertionError(f"it did not end: {said[-200:]!r}")


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_all_that_a_process_said_comes_in_pieces_and_its_code_with_the_last(host: Host, directory: Path) -> None:
    started = host.start(order("says", directory))
    assert started.error == ""
    said, code = everything(host)
    assert (len(said), code) == (100_001 + len("error: no model\n"), 3)
    assert said.endswith(b"error: no model\n")


def test_a_node_gets_its_files_in_a_folder_that_is_taken_away(host: Host, directory: Path) -> None:
    files = {
        "run.json": b"{}", "token": b"secret\n", "config.toml": b'[buffer]\nkeys = "/on/the/launcher"\n',
        "keys/node.secret": b"k\n",
    }  # fmt: skip
    where = ("--config", "/launcher/run/config.toml", "--dir", str(directory), "--name", "node-1")
    assert host.start(order("shows", directory, *where, files=files, environment={"MINE": "yes"})).error == ""
    said, code = everything(host)
    arguments, place, mode, there, config, mine = json.loads(said)
    assert code == 0
    assert arguments == ["--config", f"{place}/config.toml", "--dir", place, "--name", "node-1"]
    assert mode == "0o700"
    assert there == dict.fromkeys(files, "0o600")
    assert config == f'[buffer]\nkeys = "{place}/keys"\n'
    assert mine == "yes"
    host.close()
    assert not Path(place).parent.exists()


def test_a_relays_wildcard_becomes_the_address_of_its_machine(host: Host, directory: Path) -> None:
    config = '[inference]\nrelay_endpoint = "tcp://*:*"\n[[inference.group]]\nrelay_endpoint = "tcp://0.0.0.0:57"\n'
    files = {"run.json": b"{}", "config.toml": config.encode()}
    host.address = "10.0.0.7"
    where = ("--config", "c", "--dir", str(directory))
    assert host.start(order("shows", directory, *where, files=files)).error == ""
    shown = tomllib.loads(json.loads(everything(host)[0])[4])["inference"]
    assert shown["relay_endpoint"] == "tcp://10.0.0.7:*"
    assert shown["group"][0]["relay_endpoint"] == "tcp://10.0.0.7:57"


def test_who_needs_the_runs_directory_and_has_it_not_is_not_started(host: Host, directory: Path) -> None:
    where = ("--config", "c", "--dir", str(directory))
    missing = host.start(order("sleeps", directory.parent / "nowhere", *where))
    assert "is not the directory of this run (r1)" in missing.error
    assert "--out on a file system" in missing.error
    (directory / "run.json").write_text(json.dumps({"run": "another"}))
    assert "is not the directory of this run (r1)" in Host().start(order("sleeps", directory, *where)).error


def test_a_signal_reaches_it_and_its_end_is_told_as_popen_does(host: Host, directory: Path) -> None:
    host.start(order("sleeps", directory))
    wait_for(lambda: host.look(0, 0.1).piece == b"up\n")
    host.send_signal(signal.SIGTERM)
    assert everything(host) == (b"up\n", -signal.SIGTERM)
    host.send_signal(signal.SIGTERM)  # nobody is there any more


def test_with_it_goes_what_it_started(host: Host, directory: Path) -> None:
    host.start(order("spawns", directory))
    wait_for(lambda: bool(host.look(0, 0.1).piece))
    worker = int(host.look(0, 0.1).piece)
    host.kill()
    assert everything(host)[1] == -signal.SIGKILL
    assert gone(worker)


def test_an_interpreter_that_is_not_there_is_named(host: Host, directory: Path) -> None:
    spec = ProcessSpec("x", "fakehosts.sleeps", python="/nowhere/python")
    assert "/nowhere/python cannot be started" in host.start(Order(spec, False, "r1", str(directory))).error


def test_it_ends_with_an_actor_that_is_killed(host: Host, directory: Path) -> None:
    """And the thread that called `start` may be gone long before."""
    script = f"""
        import threading, time
        from async_rl.run.host import Host, Order
        from async_rl.run.launch import ProcessSpec
        host = Host()
        order = Order(ProcessSpec("sleeps", "fakehosts.sleeps"), False, "r1", {str(directory)!r})
        thread = threading.Thread(target=lambda: print(host.start(order).pid, flush=True))
        thread.start()
        thread.join(30)
        time.sleep(600)
    """
    actor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert actor.stdout is not None
        child = psutil.Process(int(actor.stdout.readline()))
        time.sleep(0.5)
        assert child.is_running()
    finally:
        actor.kill()
        actor.communicate(timeout=60)
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()

"""`pool_main` in real processes: a small pool of our own, and decoys that hide the house's packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from async_rl.config import Config, ModelConfig
from async_rl.run.directory import RunDirectory
from async_rl.run.launch import child_environment
from async_rl.run.process import EXIT_AGAIN, HouseError, check_house

BODIES = {
    "well": "print(context.name, context.resume, context.config.run.steps)",
    "refuses": "raise AsyncRLError('port 5701\\nis in use')",
    "again": "raise NeedsRestart('its engine is gone')",
    "breaks": "raise ZeroDivisionError('by nought')",
    "loads": "print('loading', flush=True); time.sleep(600)",
    "polls": """
        context.stopping.is_set()
        print("polling", flush=True)
        while not context.stopping.wait(0.05):
            pass
        print("checkpointed")
    """,
    "deaf": """
        import signal
        from async_rl.run import process
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(600)
    """,
    "lingers": "threading.Thread(target=time.sleep, args=(600,)).start()",
}
FRAME = """
import threading, time
from async_rl.errors import AsyncRLError, NeedsRestart
from async_rl.run import process
from async_rl.run.process import pool_main
process.ORPHAN_GRACE = 0.5
process.EXIT_GRACE = 2.0
def body(context):
{body}
pool_main(__file__, body)
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    package = tmp_path / "path" / "fakepool"
    package.mkdir(parents=True)
    for name, source in BODIES.items():
        body = textwrap.indent(textwrap.dedent(source).strip(), "    ")
        (package / f"{name}.py").write_text(FRAME.format(body=body))
    config = Config(task={"kind": "digit_sort"}, model=ModelConfig(path=str(tmp_path)))
    made = RunDirectory.create(tmp_path / "run", config)
    yield made
    made.remove_sockets()


def start(directory: RunDirectory, name: str, *flags: str, launched: bool = False) -> subprocess.Popen[str]:
    environment = {**child_environment(), "PYTHONPATH": str(directory.path.parent / "path")}
    if not launched:
        del environment["ASYNC_RL_PARENT_DEATH"]
    arguments = ["--config", str(directory.config_path), "--dir", str(directory.path), "--name", "me", *flags]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"fakepool.{name}", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_a_body_gets_its_config_name_and_flags_and_exits_with_0(directory: RunDirectory) -> None:
    assert ends(start(directory, "well", "--resume"))[:2] == (0, "me True 100\n")


def test_an_error_meant_for_people_is_one_line_at_the_end_and_a_traceback_only_with_debug(
    directory: RunDirectory,
) -> None:
    code, _, err = ends(start(directory, "refuses"))
    assert (code, err) == (1, "error: port 5701 is in use\n")
    code, _, err = ends(start(directory, "refuses", "--debug"))
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("error: port 5701 is in use\n")


def test_what_would_go_on_if_it_were_started_again_says_so_by_its_exit_code(directory: RunDirectory) -> None:
    code, _, err = ends(start(directory, "again"))
    assert (code, err) == (EXIT_AGAIN, "error: its engine is gone\n")


def test_a_pool_of_a_group_that_there_is_not_is_refused(directory: RunDirectory) -> None:
    code, _, err = ends(start(directory, "well", "--group", "fast"))
    assert code == 1
    assert err == "error: --group fast: this config has no [[inference.group]]: leave it out\n"


def test_an_unexpected_error_is_logged_whole_and_named_in_the_last_line(directory: RunDirectory) -> None:
    code, _, err = ends(start(directory, "breaks"))
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: ZeroDivisionError: by nought"


def test_sigterm_ends_a_body_that_does_not_watch_yet_at_once(directory: RunDirectory) -> None:
    process = start(directory, "loads")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert ends(process)[0] == 128 + signal.SIGTERM


def test_sigterm_leaves_the_end_to_a_body_that_watches(directory: RunDirectory) -> None:
    process = start(directory, "polls")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert ends(process)[:2] == (0, "checkpointed\n")


def test_a_thread_that_never_ends_does_not_keep_the_process(directory: RunDirectory) -> None:
    assert ends(start(directory, "lingers"))[0] == 0


def test_a_process_that_ignores_sigterm_does_not_outlive_its_launcher(directory: RunDirectory, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from async_rl.run.directory import RunDirectory
        from async_rl.run.pools import Pools
        from async_rl.run.plans import plan_pool
        run = RunDirectory.open(Path({str(directory.path)!r}))
        with Pools([plan_pool("deaf", "fakepool.deaf", run.config_path, run)], run.logs, 5) as pools:
            pools.supervise()
    """)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "path")}
    launcher = subprocess.Popen([sys.executable, "-c", script], env=environment)
    log = directory.logs / "deaf.log"
    deadline = time.monotonic() + 60
    try:
        while not (log.exists() and "deaf" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        orphans = psutil.Process(launcher.pid).children()
    finally:
        launcher.kill()
        launcher.wait()
    assert psutil.wait_procs(orphans, timeout=60)[1] == []


def test_a_pool_of_another_package_of_that_name_refuses_to_start_and_names_both_paths(
    directory: RunDirectory, tmp_path: Path
) -> None:
    decoy = tmp_path / "path" / "trainer"
    decoy.mkdir()
    (decoy / "__init__.py").touch()
    (decoy / "learner.py").write_text(FRAME.format(body="    pass"))
    environment = {**child_environment(), "PYTHONPATH": str(tmp_path / "path")}
    arguments = ["--config", str(directory.config_path), "--dir", str(directory.path), "--name", "trainer"]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.learner", *arguments], env=environment, capture_output=True, text=True
    )
    house = Path(__file__).resolve().parents[3]
    assert run.returncode == 1
    assert f"package 'trainer' is {decoy}, not {house / 'trainer'}" in run.stderr


def test_the_house_lies_together_here() -> None:
    check_house(["buffer", "inference", "trainer"])
    with pytest.raises(HouseError, match="package 'json'"):
        check_house(["json"])

"""The launcher with real processes: small fake pools, written to a folder on PYTHONPATH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from gone import gone
from hypothesis import given
from hypothesis import strategies as st

from async_rl.run.gang import Gang
from async_rl.run.launch import Exit, Outcome, ProcessSpec, child_environment, last_line
from async_rl.run.pools import Pools
from async_rl.run.process import EXIT_AGAIN

FAKES = {
    "ranks": """
        import os, pathlib, sys, time
        number, folder = sys.argv[1], pathlib.Path(sys.argv[2])
        if "--again" in sys.argv:
            print("--again")
            sys.exit(0)
        (folder / f"part-{number}").write_text(str(os.getpid()))
        (folder / f"part-{number}").rename(folder / f"begun-{number}")
        time.sleep(600)
    """,
    "well": "import time; time.sleep(0.2)",
    "fails": "import sys, time; time.sleep(0.3); print('a line'); sys.exit('error: no such model /nowhere')",
    "lasts": "import time; time.sleep(2.0)",
    "sleeps": "import time; time.sleep(600)",
    "until": """
        import pathlib, sys, time
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.05)
    """,
    "again": """
        import pathlib, sys, time
        times = pathlib.Path(sys.argv[1])
        with times.open("a") as file:
            print(*sys.argv[2:], file=file)
        time.sleep(0.3)
        if len(times.read_text().splitlines()) <= 2:
            print("error: the engine says no more")
            sys.exit(75)
    """,
    "says": "import os, sys; print(sys.executable, os.environ['PATH'], os.environ['PYTHONPATH'])",
    "tidies": """
        import pathlib, signal, sys, time
        def end(*_):
            pathlib.Path(sys.argv[1]).write_text("checkpointed")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(600)
    """,
    "ignores": """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"worker {worker.pid}", flush=True)  # in one write, as somebody waits for it
        time.sleep(600)
    """,
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "path" / "fakepools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, source in FAKES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    logs = tmp_path / "logs"
    logs.mkdir()
    return logs


EARLIER: list[psutil.Process] = []


@pytest.fixture(autouse=True)
def _earlier_children() -> None:
    EARLIER[:] = psutil.Process().children(recursive=True)


def fake(name: str, *arguments: str, ends_run: bool = False, called: str = "", expendable: bool = False) -> ProcessSpec:
    return ProcessSpec(called or name, f"fakepools.{name}", arguments, ends_run, expendable=expendable)


def children() -> list[psutil.Process]:
    """That a test here has started: others may have left what multiprocessing keeps."""
    return [child for child in psutil.Process().children(recursive=True) if child not in EARLIER]


def wait_for(condition, timeout: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def touch_after(pools: Pools, files: dict[str, Path]) -> Callable[[], None]:
    """A tick that touches a process's file once its end was noted: what waits for that file ends after it, however
    slowly any of them starts."""

    def tick() -> None:
        for name, file in files.items():
            if name in pools._exits:
                file.touch()

    return tick


def log_says(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


def test_a_run_whose_processes_all_end_well_ends_with_0(fakes: Path) -> None:
    with Pools([fake("well", ends_run=True), fake("well", called="other")], fakes, grace=60) as pools:
        outcome = pools.supervise()
    assert outcome == Outcome()
    assert outcome.code == 0
    assert outcome.message(5) == ""


def test_the_first_failure_takes_the_others_down_and_is_named_with_its_last_words_and_log(fakes: Path) -> None:
    with Pools([fake("sleeps"), fake("fails", called="trainer", ends_run=True)], fakes, grace=60) as pools:
        outcome = pools.supervise()
        assert children() == []
    assert outcome.code == 1
    log = fakes / "trainer.log"
    assert outcome.message(5) == f"trainer failed (exit 1): no such model /nowhere; log: {log}"


def test_a_run_goes_on_without_an_expendable_process_and_says_so(fakes: Path, tmp_path: Path) -> None:
    failed = tmp_path / "failed"
    specs = [
        fake("until", str(failed), called="trainer", ends_run=True), fake("fails", called="node-0", expendable=True),
        fake("until", str(failed), called="node-1", expendable=True),
    ]  # fmt: skip
    with Pools(specs, fakes, grace=60) as pools:
        outcome = pools.supervise(touch_after(pools, {"node-0": failed}))
    assert (outcome.code, outcome.failures) == (0, ())
    assert [str(loss).split(";")[0] for loss in outcome.lost] == ["node-0 failed (exit 1): no such model /nowhere"]


def test_the_last_expendable_process_that_fails_ends_the_run_and_all_that_failed_are_named(fakes: Path) -> None:
    specs = [fake("sleeps", ends_run=True), *(fake("fails", called=f"node-{i}", expendable=True) for i in range(2))]
    with Pools(specs, fakes, grace=60) as pools:
        outcome = pools.supervise()
        assert children() == []
    assert outcome.code == 1
    assert {failure.name for failure in outcome.failures} >= {"node-0", "node-1"}


def node_that_asks_for_another_start(times: Path) -> ProcessSpec:
    return ProcessSpec("node-0", "fakepools.again", (str(times),), expendable=True, again=("--again",))


def test_a_process_that_asks_to_be_started_again_is_and_the_launchers_log_says_why(fakes: Path, tmp_path: Path) -> None:
    times, enough = tmp_path / "times", tmp_path / "enough"
    specs = [fake("until", str(enough), ends_run=True), node_that_asks_for_another_start(times)]

    def tick() -> None:
        if times.exists() and len(times.read_text().splitlines()) == 3:
            enough.touch()

    with Pools(specs, fakes, grace=60, restarts=2) as pools:
        outcome = pools.supervise(tick)
    assert (outcome.code, outcome.lost) == (0, ())
    assert [(ended.name, ended.code) for ended in outcome.restarted] == [("node-0", EXIT_AGAIN)] * 2
    assert times.read_text().splitlines() == ["", "--again", "--again"]
    line = "node-0 could not go on (the engine says no more) and is started again"
    assert (fakes / "launcher.log").read_text().splitlines() == [line] * 2


def test_a_process_that_asks_too_often_has_failed(fakes: Path, tmp_path: Path) -> None:
    specs = [fake("sleeps", ends_run=True), node_that_asks_for_another_start(tmp_path / "times")]
    with Pools(specs, fakes, grace=60, restarts=1) as pools:
        outcome = pools.supervise()
    assert len(outcome.restarted) == 0  # told only of runs that ended well
    assert outcome.message(5) == (f"node-0 failed (exit 75): the engine says no more; log: {fakes / 'node-0.log'}")


def test_a_process_may_have_an_interpreter_of_its_own_and_that_ones_programs(fakes: Path, tmp_path: Path) -> None:
    """One in an environment that lacks async-rl finds the checkout's; it is not this process's environment it sees."""
    environment = tmp_path / "elsewhere"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    python = str(environment / "bin" / "python")
    with Pools([ProcessSpec("says", "fakepools.says", python=python)], fakes, grace=60) as pools:
        assert pools.supervise().code == 0
    executable, path, places = (fakes / "says.log").read_text().split()
    assert executable == python
    assert path.split(os.pathsep)[0] == str(environment / "bin")
    checkout = Path(__file__).resolve().parents[3]
    assert places.split(os.pathsep) == [str(checkout), *os.environ["PYTHONPATH"].split(os.pathsep)]


def test_where_other_packages_lie_too_is_no_path_for_another_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.run.launch.HOUSE_PLACE", Path("/somewhere/lib/python3.11/site-packages"))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert child_environment("/v/bin/python")["PYTHONPATH"] == "/mine"


def test_a_run_whose_last_node_was_drained_waits_for_another_one_to_come(fakes: Path, tmp_path: Path) -> None:
    failed, drained = tmp_path / "failed", tmp_path / "drained"
    specs = [
        fake("until", str(drained), called="trainer", ends_run=True), fake("fails", called="node-0", expendable=True),
        fake("until", str(failed), called="node-1", expendable=True),
    ]  # fmt: skip
    with Pools(specs, fakes, grace=60) as pools:
        outcome = pools.supervise(touch_after(pools, {"node-0": failed, "node-1": drained}))
    assert (outcome.code, [loss.name for loss in outcome.lost]) == (0, ["node-0"])


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_with_its_workers(fakes: Path) -> None:
    with Pools([fake("ignores"), fake("fails")], fakes, grace=0.5) as pools:
        wait_for(lambda: log_says(fakes / "ignores.log", "worker"))
        worker = int((fakes / "ignores.log").read_text().split()[1])
        outcome = pools.supervise()
    assert [failure.name for failure in outcome.failures] == ["fails"]
    assert gone(worker)


def test_what_does_not_end_after_the_run_is_ended_by_force_and_named(fakes: Path) -> None:
    with Pools([fake("well", ends_run=True), fake("sleeps")], fakes, grace=0.5) as pools:
        outcome = pools.supervise()
    assert outcome.stuck == ("sleeps",)
    assert outcome.code == 1
    assert "sleeps did not end within 0.5 s" in outcome.message(0.5)


def test_an_expendable_process_that_came_too_late_to_hear_of_the_end_is_told(fakes: Path) -> None:
    specs = [fake("well", ends_run=True), fake("lasts", expendable=True), fake("sleeps", expendable=True)]
    with Pools(specs, fakes, grace=12) as pools:
        outcome = pools.supervise()
    assert (outcome.code, outcome.stuck, outcome.lost) == (0, (), ())
    assert children() == []


@pytest.mark.parametrize(("leads", "other", "grace"), [(True, "until", 60), (True, "sleeps", 5), (False, "sleeps", 60)])
def test_an_interrupt_reaches_every_process_and_waits_for_its_orderly_end(
    leads: bool, other: str, grace: float, fakes: Path, tmp_path: Path
) -> None:
    """Where one ends the run it is told first, and the others may end after it by themselves, or are told when the
    grace is over; else all are told."""
    saved = tmp_path / "saved"
    before = signal.getsignal(signal.SIGINT)
    with Pools([fake("tidies", str(saved), ends_run=leads), fake(other, str(saved))], fakes, grace) as pools:
        wait_for(lambda: log_says(fakes / "tidies.log", "ready"))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        outcome = pools.supervise()
    assert outcome.code == 130
    assert saved.read_text() == "checkpointed"
    assert children() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_in_the_launcher_leaves_no_process_behind(fakes: Path) -> None:
    def tick() -> None:
        raise RuntimeError("display")

    with pytest.raises(RuntimeError, match="display"), Pools([fake("sleeps")], fakes, grace=60) as pools:
        pools.supervise(tick)
    assert children() == []


def test_no_process_outlives_a_launcher_that_is_killed(fakes: Path, tmp_path: Path) -> None:
    script = f"""
        from pathlib import Path
        from async_rl.run.launch import ProcessSpec
        from async_rl.run.pools import Pools
        specs = [ProcessSpec("a", "fakepools.sleeps"), ProcessSpec("b", "fakepools.tidies", ({str(tmp_path / "s")!r},))]
        with Pools(specs, Path({str(fakes)!r}), 60) as pools:
            pools.supervise()
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        wait_for(lambda: log_says(fakes / "b.log", "ready"))
        orphans = psutil.Process(launcher.pid).children(recursive=True)
        assert len(orphans) == 2
    finally:
        launcher.kill()
        launcher.wait()
    ended, alive = psutil.wait_procs(orphans, timeout=60)
    assert (len(ended), alive) == (2, [])
    assert (tmp_path / "s").read_text() == "checkpointed"


def rank(number: int, saved: Path, module: str = "ranks") -> ProcessSpec:
    return ProcessSpec(
        f"rank{number}", f"fakepools.{module}", (str(number), str(saved)), ends_run=number == 0, again=("--again",),
        rank=number, world=3,
    )  # fmt: skip


def test_a_rank_that_is_killed_takes_the_others_along_and_all_are_started_again(fakes: Path, tmp_path: Path) -> None:
    with Pools([rank(number, tmp_path) for number in range(3)], fakes, grace=60, restarts=1) as pools:
        wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 3)
        os.kill(int((tmp_path / "begun-1").read_text()), signal.SIGKILL)
        outcome = pools.supervise()
    assert (outcome.code, [ended.name for ended in outcome.restarted]) == (0, ["rank1"]), outcome
    assert "rank1 was killed by SIGKILL: all 3 ranks are started again" in (fakes / "launcher.log").read_text()
    assert all((fakes / f"rank{number}.log").read_text().split() == ["--again"] for number in range(3))
    assert children() == []


def test_ranks_that_are_killed_too_often_have_failed_and_the_one_that_was_killed_is_named(
    fakes: Path, tmp_path: Path
) -> None:
    with Pools([rank(number, tmp_path) for number in range(3)], fakes, grace=60) as pools:
        wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 3)
        os.kill(int((tmp_path / "begun-2").read_text()), signal.SIGKILL)
        outcome = pools.supervise()
    assert [failure.name for failure in outcome.failures] == ["rank2"]
    assert children() == []


def test_a_rank_that_fails_with_a_reason_ends_the_run_and_starts_nothing_again(fakes: Path, tmp_path: Path) -> None:
    specs = [rank(0, tmp_path), rank(1, tmp_path), rank(2, tmp_path, "fails")]
    with Pools(specs, fakes, grace=60, restarts=3) as pools:
        outcome = pools.supervise()
    assert [str(failure).partition(";")[0] for failure in outcome.failures] == [
        "rank2 failed (exit 1): no such model /nowhere"
    ]
    assert outcome.restarted == ()


@given(st.lists(st.sampled_from([1, EXIT_AGAIN, -9, -15]), min_size=1, max_size=6), st.integers(0, 6))
def test_of_ranks_that_ended_together_the_one_that_was_lost_or_killed_is_the_cause(codes: list[int], lost: int) -> None:
    gang = Gang([f"r{index}" for index in range(len(codes))])
    for index, code in enumerate(codes):
        gang.fell(Exit(f"r{index}", code, "", None, "gone" if index == lost else ""), float(index))
    cause = gang.cause()
    if cause is None:
        assert set(codes) == {1}
    else:
        assert cause.calls_for_another
        if lost < len(codes) and codes[lost] != 1:
            assert cause.lost
        elif min(codes) < 0:
            assert cause.code < 0


def test_the_last_line_is_the_last_that_says_anything(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("first\nerror: port 5555 is in use\n\n  \n")
    assert last_line(log) == "port 5555 is in use"
    assert last_line(tmp_path / "missing.log") == ""


def test_a_process_that_died_of_a_signal_is_said_to_have() -> None:
    assert str(Exit("node-1", -9, "", None)) == "node-1 failed (killed by SIGKILL)"

"""Several processes as one trainer: every call on all of them, and what becomes of it when one of them is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from real_runs import wait_for

from async_rl.errors import AsyncRLError
from async_rl.parallel_config import ParallelConfig
from async_rl.run.process import EXIT_AGAIN
from trainer.ranks.channel import failure_in
from trainer.ranks.place import Place, check_devices, check_world, first_place, torchrun_place

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "small_rank.py"
LIMIT_S = 280.0

pytestmark = pytest.mark.timeout(400)


class Leader:
    """Rank 0 of a case, in a folder of its own."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), "lead", str(folder), case],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        )  # fmt: skip

    def outcome(self) -> tuple[int, list[str], str]:
        """Exit code, what it printed, and its last line of stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out.splitlines(), (err.strip().splitlines() or [""])[-1]

    def pid(self, rank: int) -> int:
        """Of a rank that has saved its shard."""
        path = self.folder / f"shard-{rank}"
        wait_for(lambda: path.exists() and path.read_text() != "", LIMIT_S, path.name)
        return int(path.read_text())

    def left(self) -> list[psutil.Process]:
        """Ranks that still run, after a moment to end."""
        deadline = time.monotonic() + 60
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _running(self) -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline"])
        return [process for process in every if str(self.folder) in (process.info["cmdline"] or ())]


@pytest.fixture
def leaders(tmp_path: Path) -> Iterator[list[Leader]]:
    started: list[Leader] = []
    yield started
    for leader in started:
        for process in leader._running():
            process.kill()
        leader.process.wait(60)


def test_every_call_is_made_on_all_ranks_and_errors_that_callers_look_for_keep_their_type(
    tmp_path: Path, leaders: list[Leader]
) -> None:
    leaders.append(leader := Leader(tmp_path, "everything"))
    code, out, last = leader.outcome()
    assert (code, out) == (0, [
        "7 ('a.b',) True (2, 1)",
        "21.0 [1.0, 1.0, 1.0, 1.0] False",
        "[0.5, 0.5, 0.5, 0.5] [0.5, 0.5, 0.5]",
        "d1 d2 d5",
        "AsyncRLError: no such checkpoint",
        "FloatingPointError: a loss that is not finite",
        "RankFailed: rank 2 of the trainer failed: its disk is full",
        "21.0",
        "done",
    ]), last  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("e-*")) == ["e-0", "e-1", "e-2"]
    assert leader.left() == []


@pytest.mark.long
def test_a_rank_that_is_killed_while_nothing_is_computed_ends_the_trainer_which_asks_for_another_start(
    tmp_path: Path, leaders: list[Leader]
) -> None:
    leaders.append(leader := Leader(tmp_path, "idles"))
    pid = leader.pid(2)
    wait_for((tmp_path / "idle").exists, LIMIT_S, "rank 0")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    code, _, last = leader.outcome()
    assert time.monotonic() - killed < 60
    assert (code, last) == (
        EXIT_AGAIN, f"error: rank 2 was killed by SIGKILL; log: {tmp_path / 'trainer-rank2.log'}"
    )  # fmt: skip
    assert leader.left() == []


@pytest.mark.long
def test_a_rank_that_is_stopped_for_long_counts_as_lost(tmp_path: Path, leaders: list[Leader]) -> None:
    leaders.append(leader := Leader(tmp_path, "idles, and looks for stopped ones"))
    pid = leader.pid(2)
    wait_for((tmp_path / "idle").exists, LIMIT_S, "rank 0")
    os.kill(pid, signal.SIGSTOP)
    code, _, last = leader.outcome()
    log = tmp_path / "trainer-rank2.log"
    assert (code, last) == (EXIT_AGAIN, f"error: rank 2 has been stopped for 0.5 s; log: {log}")
    assert leader.left() == []


def test_a_rank_that_dies_in_a_step_ends_the_trainer_although_the_others_wait_for_it(
    tmp_path: Path, leaders: list[Leader]
) -> None:
    leaders.append(leader := Leader(tmp_path, "one dies"))
    code, _, last = leader.outcome()
    assert (code, last) == (
        EXIT_AGAIN, f"error: rank 2 was killed by SIGKILL; log: {tmp_path / 'trainer-rank2.log'}"
    )  # fmt: skip
    assert leader.left() == []


def test_a_rank_that_fails_alone_in_a_step_is_named_with_its_reason(tmp_path: Path, leaders: list[Leader]) -> None:
    leaders.append(leader := Leader(tmp_path, "one fails"))
    code, _, last = leader.outcome()
    reason = "rank 1 of the trainer failed: ValueError: out of memory, say; the others wait for it in vain"
    assert (code, last) == (1, f"error: {reason}")
    assert leader.left() == []


@pytest.mark.parametrize(
    ("case", "last_line"),
    [
        ("one raises", "RankFailed: rank 1 of the trainer failed: ValueError: attempt 7 cannot be trained"),
        pytest.param("all raise", "ValueError: attempt 7 cannot be trained", marks=pytest.mark.long),
    ],
)
def test_an_error_that_every_start_would_meet_is_raised_on_rank_0_which_has_time_to_tell_others(
    case: str, last_line: str, tmp_path: Path, leaders: list[Leader]
) -> None:
    leaders.append(leader := Leader(tmp_path, case))
    code, out, last = leader.outcome()
    assert (code, out) == (1, ["told the others"])
    assert last.endswith(last_line)
    assert leader.left() == []


def test_a_failure_that_is_over_between_two_looks_at_the_store_is_none(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    store.set_timeout(timedelta(seconds=0.2))

    class OverMeanwhile:
        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            return store.get(key)

    began = time.monotonic()
    assert failure_in(OverMeanwhile()) is None  # type: ignore[arg-type]
    assert time.monotonic() - began < 60


def test_a_trainer_does_not_outlive_the_watch_over_its_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(SCRIPT), "unwatched", str(tmp_path / "meeting")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "error: nobody looks after the ranks any more: KeyError: 'what'"


@pytest.mark.long
def test_ranks_die_with_the_first_even_in_the_middle_of_a_step(tmp_path: Path, leaders: list[Leader]) -> None:
    leaders.append(leader := Leader(tmp_path, "hangs"))
    for rank in range(3):
        wait_for((tmp_path / f"in-step-{rank}").exists, LIMIT_S, f"rank {rank}")
    leader.process.kill()
    leader.process.wait(60)
    assert leader.left() == []


def test_a_model_that_a_rank_cannot_make_is_one_error_on_rank_0(tmp_path: Path, leaders: list[Leader]) -> None:
    (tmp_path / "refuses").touch()
    leaders.append(leader := Leader(tmp_path, "everything"))
    code, out, last = leader.outcome()
    assert (code, out, last) == (1, [], "[rank0]: async_rl.errors.AsyncRLError: no such model")
    assert leader.left() == []


def test_what_torchrun_says_is_read_and_has_to_fit_the_layout() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = torchrun_place(environment)
    assert place == Place(3, 4, 1)
    assert torchrun_place({}) is None
    assert first_place(4, Path("f"), environment) == place
    for alone in ({}, environment | {"RANK": "0", "WORLD_SIZE": "1"}):
        assert first_place(4, Path("f"), alone) == Place(0, 4, 0, Path("f"))
    check_world(place, ParallelConfig(tensor=2, data=2))
    with pytest.raises(AsyncRLError, match=r"torchrun started 4 processes.* needs 8: change one of them"):
        check_world(place, ParallelConfig(tensor=2, pipeline=2, data=2))


def test_each_rank_on_a_machine_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    check_devices(Place(0, 2, 0, tmp_path), 2)
    check_devices(Place(9, 16, 1), 8)
    for place in (Place(0, 4, 0, tmp_path), Place(11, 16, 3)):
        with pytest.raises(AsyncRLError, match="4 ranks on this machine, which has 2 GPUs"):
            check_devices(place, 2)

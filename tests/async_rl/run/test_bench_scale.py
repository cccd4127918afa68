"""What `async-rl bench scale` reads from a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import AsyncRLError
from async_rl.run.bench_scale import WARM_UP, measures_of, shards_cpu_s


def messages(steps: int) -> dict[str, int]:
    return {"results": 64 * steps, "control": 32 * steps}


def run_records(steps: int) -> list[dict[str, Any]]:
    """A step a second with a look at the pools after it: 64 trajectories, 32 messages and one push each."""
    return [
        record
        for step in range(steps)
        for record in (
            {"step": step, "time_s": step + 1.0, "reward": 0.5},
            {"time_s": step + 1.0, "pools": {"messages": messages(step + 1), "push_ms": [step + 1.0]}},
        )
    ]


def test_rates_are_of_the_time_after_the_warm_up_and_costs_of_the_whole_run() -> None:
    assert measures_of(run_records(10), {"buffer": 0.64, "buffer-1": 1.28}) == {
        "trajectories_per_s": 64.0, "push_p50_ms": 5.0, "push_p99_ms": 10.0, "control_messages": 0.5,
        "buffer_cpu_ms": pytest.approx(3.0), "shard_cpu_ms": pytest.approx(2.0),
    }  # fmt: skip


def test_a_run_that_was_too_short_says_so() -> None:
    with pytest.raises(AsyncRLError, match="raise --steps"):
        measures_of(run_records(WARM_UP), {})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_the_cpu_time_of_a_runs_shards_is_found_by_their_names(tmp_path: Path) -> None:
    code = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    words = ["buffer.service", "--dir", str(tmp_path), "--name", "buffer-1"]
    with subprocess.Popen([sys.executable, "-c", code, *words], env=os.environ) as process:
        try:
            deadline = time.monotonic() + 60
            while shards_cpu_s(tmp_path).get("buffer-1", 0.0) < 0.3 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert 0.3 <= shards_cpu_s(tmp_path)["buffer-1"] < 30
            assert shards_cpu_s(tmp_path / "other") == {}
        finally:
            process.kill()

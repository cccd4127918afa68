"""A disk that is full under the journal: the run ends at once, says so, and goes on from there when there is room."""

from __future__ import annotations

import resource

import psutil
import pytest
from real_runs import Shell, processes_of, records, summary, wait_for

STEPS = 6


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_full_disk_under_the_journal_ends_the_run_by_name_and_resume_goes_on(shell: Shell) -> None:
    """No file of the buffer's may grow any further: its next record fails half-way, as on a full disk."""
    run = shell.folder / "run"
    started = shell.start("run", str(shell.config), "--out", str(run))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 1, 120, "a step")
    size = max(path.stat().st_size for path in (run / "journal").glob("*.seg"))
    fill_up(the_buffer(run), size + 100)
    output, _ = started.communicate(timeout=150)
    assert started.returncode == 1
    assert "the journal in" in output, output
    assert "make room" in output
    assert "Traceback" not in output
    assert processes_of(run) == []
    code, output = shell.run("run", str(shell.config), "--out", str(run), "--resume", timeout=300)
    assert code == 0, output
    assert [record["step"] for record in records(run)] == list(range(STEPS))
    ledger = summary(run)["ledger"]
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())


def the_buffer(run: object) -> psutil.Process:
    (process,) = [each for each in processes_of(run) if "buffer.service" in each.cmdline()]  # type: ignore[arg-type]
    return process


def fill_up(process: psutil.Process, nbytes: int) -> None:
    process.rlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

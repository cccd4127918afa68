"""The page about old data is what its file says, and the file says what the project claims."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from async_rl.run.bench_staleness import without_outdated
from async_rl.run.bench_staleness_plan import UNCORRECTED
from async_rl.run.bench_staleness_results import ON_POLICY, Place, rows

FOLDER = Path(__file__).parents[2] / "docs" / "staleness"
DOCUMENT = json.loads((FOLDER / "staleness.json").read_text())
HARDEST = Place(lag=16, reuse=1, learning_rate=5e-4)


def test_the_page_about_staleness_is_made_of_its_file() -> None:
    render = runpy.run_path(str(FOLDER / "render.py"))["render"]
    assert (FOLDER / "README.md").read_text() == render(DOCUMENT), "run: python docs/staleness/render.py"
    assert (FOLDER / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_every_run_of_the_file_is_of_a_correction_as_it_is_now() -> None:
    assert without_outdated(DOCUMENT["runs"]) == DOCUMENT["runs"]


def test_every_token_was_as_old_as_its_lag_says() -> None:
    for run in DOCUMENT["runs"]:
        oldest = run["lag"] + run["reuse"] - 1
        assert run["metrics"]["age_max"] <= oldest
        if run["reuse"] == 1:
            assert run["metrics"]["age_min"] == run["metrics"]["age_max"] == run["lag"]


def test_uncorrected_learning_from_old_data_collapses_and_three_corrections_stay_near_on_policy() -> None:
    """What falls in every seed though it corrects is what the alarms end, for want of data that it lets train."""
    table = {row.correction: row for row in rows(DOCUMENT["runs"], HARDEST)}
    assert all(row.n >= 3 for row in table.values())
    assert table[UNCORRECTED].below == table[UNCORRECTED].n
    corrected = [row for name, row in table.items() if name not in (ON_POLICY, UNCORRECTED)]
    fallen = [row for row in corrected if row.below == row.n]
    assert all(row.alarmed == row.watched > 0 for row in fallen)
    assert sum(row.gap >= -0.06 for row in corrected) >= 3

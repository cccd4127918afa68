"""The page about what sketches learn is what its file says, and the file says what the project claims."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from async_rl.run.bench_staleness_results import final, start

FOLDER = Path(__file__).parents[2] / "docs" / "sketch"
DOCUMENT = json.loads((FOLDER / "learning.json").read_text())
RENDER = runpy.run_path(str(FOLDER / "render.py"))
FAST, CONTROLLED = RENDER["FAST"], f"{RENDER['FAST']}, step control"


def test_the_page_about_sketches_is_made_of_its_file() -> None:
    assert (FOLDER / "README.md").read_text() == RENDER["render"](DOCUMENT), "run: python docs/sketch/render.py"
    assert (FOLDER / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_every_arm_was_run_with_five_seeds_on_data_of_one_age() -> None:
    for row in RENDER["rows"](DOCUMENT["runs"]):
        assert [run["seed"] for run in row.runs] == list(range(5))
    assert {run["lag"] for run in DOCUMENT["runs"]} == {4}


def test_a_redrawn_sketch_is_within_two_standard_errors_of_dense_adamw() -> None:
    table = RENDER["rows"](DOCUMENT["runs"])
    gap, error = RENDER["distance"](*(RENDER["better_rate"](table, RENDER[arm]) for arm in ("WIDE", "DENSE")))
    assert abs(gap) <= 2 * error


def test_at_ten_times_the_rate_runs_die_without_step_control_and_survive_with_it() -> None:
    fast = [run for run in DOCUMENT["runs"] if run["correction"].endswith(FAST)]
    controlled = [run for run in DOCUMENT["runs"] if run["correction"].endswith(CONTROLLED)]
    assert len(fast) == len(controlled) == 3 * 5
    assert all(final(run) < start(run) / 2 and run["alarm_at"] is not None for run in fast)
    assert all(final(run) > start(run) and run["alarm_at"] is None for run in controlled)

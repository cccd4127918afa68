"""The page of benchmarks is what its files say."""

from __future__ import annotations

import runpy
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "bench"


def test_the_page_of_benchmarks_is_made_of_its_files() -> None:
    render = runpy.run_path(str(FOLDER / "render.py"))["render"]
    assert (FOLDER / "README.md").read_text() == render(FOLDER), "run: python docs/bench/render.py"

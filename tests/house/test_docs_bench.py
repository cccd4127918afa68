"""The page of benchmarks is what its files say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import median

import pytest

from async_rl.run.bench import ratios

FOLDER = Path(__file__).parents[2] / "docs" / "bench"


def test_the_page_of_benchmarks_is_made_of_its_files() -> None:
    render = runpy.run_path(str(FOLDER / "render.py"))["render"]
    assert (FOLDER / "README.md").read_text() == render(FOLDER), "run: python docs/bench/render.py"


@pytest.mark.parametrize("arm", ["packed", "packed, checkpointed"])
def test_packed_training_took_at_most_what_the_page_lets_one_expect(arm: str) -> None:
    """0.7 of padded training's time and 0.6 of its memory, for the same gradient, where the mean length is at most 0.4
    of the longest."""
    document = json.loads((FOLDER / "packing.json").read_text())
    (cell,) = (cell for cell in document["cells"] if arm in cell["arms"])
    found = cell["arms"][arm]
    assert 1 / median(ratios(cell, arm, document["metrics"][0])) <= 0.7
    assert max(median(found["resident_share"]), median(found["tensors_share"])) <= 0.6
    assert max(found["gradient_gap"]) <= 1e-5

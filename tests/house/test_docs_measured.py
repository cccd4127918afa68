"""The pages that a measurement wrote say what its file says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["recovery", "length_bias"])
def test_the_page_is_what_the_measurement_wrote(name: str) -> None:
    folder = DOCS / name
    page = runpy.run_path(str(folder / "measure.py"))["page"]
    assert (folder / f"{name}.md").read_text() == page(json.loads((folder / f"{name}.json").read_text()))

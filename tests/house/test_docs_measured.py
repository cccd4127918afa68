"""The pages that a measurement wrote say what its file says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import msgspec
import pytest

from async_rl.run.doctor_report import Report
from async_rl.run.doctor_report import page as parity_page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["recovery", "length_bias"])
def test_the_page_is_what_the_measurement_wrote(name: str) -> None:
    folder = DOCS / name
    page = runpy.run_path(str(folder / "measure.py"))["page"]
    assert (folder / f"{name}.md").read_text() == page(json.loads((folder / f"{name}.json").read_text()))


def test_the_page_of_parity_is_what_doctor_found_and_all_of_it_agrees() -> None:
    report = msgspec.json.decode((DOCS / "parity.json").read_bytes(), type=Report)
    assert (DOCS / "parity.md").read_text() == parity_page(report)
    assert report.is_well

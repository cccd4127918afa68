"""The page about the loss is what presets and the toy policy give, and explains every part there is."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from async_rl.algorithm_config import AlgorithmConfig

PAGE = Path(__file__).parents[2] / "docs" / "algorithm.md"


@pytest.mark.slow
def test_the_tables_are_those_that_the_script_writes() -> None:
    render = runpy.run_path(str(PAGE.parent / "algorithm" / "render.py"))["render"]
    assert PAGE.read_text() == render(PAGE.read_text()), "run: python docs/algorithm/render.py"


def test_the_page_explains_every_key_and_every_value() -> None:
    text = PAGE.read_text()
    hints = get_type_hints(AlgorithmConfig)
    for field in msgspec.structs.fields(AlgorithmConfig):
        assert field.name in text
        for value in get_args(hints[field.name]):
            assert not isinstance(value, str) or value == "none" or value in text, (field.name, value)

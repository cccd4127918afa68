"""The tests of this folder ask of every engine what it declares of itself; `--engine` chooses which one is started."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    engine = config.getoption("--engine")
    left_out = [
        item
        for item in items
        if item.path.is_relative_to(HERE) and any(engine not in mark.args for mark in item.iter_markers("only"))
    ]
    if left_out:
        config.hook.pytest_deselected(left_out)
        items[:] = [item for item in items if item not in left_out]

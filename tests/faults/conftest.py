"""Fixtures of the tests that take processes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()

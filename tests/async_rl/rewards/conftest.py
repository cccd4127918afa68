from __future__ import annotations

from collections.abc import Iterator

import pytest
from cells import sandbox_or_skip

from async_rl.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    yield from sandbox_or_skip()

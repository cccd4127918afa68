"""Options of every test run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes, to make or to run, says how busy the machine is: nothing is judged by it.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

MARKERS = {
    "only(engine, ...)": "for these engines alone",
    "needs(name, ...)": "for engines that declare this of themselves: top_p, seeds, process",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine", default="torch", choices=("torch", "vllm", "sglang"), help="the engine that tests/engines starts"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")

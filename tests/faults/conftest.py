"""Fixtures of the tests that take processes away, and which of them belong to which command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Shell

HERE = Path(__file__).resolve().parent
IN_EVERY_RUN = {
    "test_a_run_survives_a_death_where_it_matters_most[buffer.after-append]",
    "test_a_run_over_a_bad_network_trains_what_it_accepted",
    "test_a_damaged_message_costs_its_sender_the_link_and_nobody_else_anything",
    "test_a_buffer_that_is_frozen_ends_who_waits_for_it_with_its_name",
}
"""What `make test` runs of this folder, beside what needs no process; the rest is `make test-sample`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.name not in IN_EVERY_RUN:
            item.add_marker(pytest.mark.sample)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()

"""A log that peers cannot fill."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from async_rl.run.calm_log import LINES, WHILE_S, CalmFilter


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def calm() -> Iterator[tuple[logging.Logger, Kept, Clock]]:
    logger, kept, clock = logging.getLogger("test_calm_log"), Kept(), Clock()
    kept.addFilter(CalmFilter(clock))
    logger.addHandler(kept)
    logger.propagate = False
    yield logger, kept, clock
    logger.removeHandler(kept)


def test_of_one_kind_only_so_many_lines_pass_and_others_are_not_kept_back(calm: tuple) -> None:
    logger, kept, _ = calm
    for number in range(LINES * 3):
        logger.warning("%s sent too much", number)
    logger.warning("something else")
    assert kept.lines == [f"{number} sent too much" for number in range(LINES)] + ["something else"]


def test_after_a_while_it_says_how_many_were_left_out(calm: tuple) -> None:
    logger, kept, clock = calm
    for _ in range(LINES + 7):
        logger.warning("%s again", 1)
    clock.now += WHILE_S
    logger.warning("%s again", 2)
    logger.warning("%s again", 3)
    assert kept.lines[LINES:] == ["2 again (7 such lines before were left out)", "3 again"]


def test_what_happens_seldom_is_always_said(calm: tuple) -> None:
    logger, kept, clock = calm
    for number in range(LINES * 3):
        clock.now += WHILE_S / LINES * 1.01
        logger.warning("%s", number)
    assert kept.lines == [str(number) for number in range(LINES * 3)]


def test_a_traceback_is_never_left_out(calm: tuple) -> None:
    logger, kept, _ = calm
    for _ in range(LINES + 5):
        try:
            raise ValueError
        except ValueError:
            logger.exception("failed")
    assert len(kept.lines) == LINES + 5

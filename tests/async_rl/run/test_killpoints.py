"""Kill points in real processes: which passing kills which process, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from async_rl.run.killpoints import VARIABLE, KillPointError, Plan, parse

SCRIPT = """
from async_rl.run import killpoints
killpoints.reached("trainer.after-draw")
killpoints.this_process_is("node-1")
for count in range(3):
    killpoints.reached("node.after-lease")
    killpoints.reached("node.before-flip")
    print(count, flush=True)
"""


def passings(variable: str | None) -> tuple[int, list[str]]:
    """How a process called node-1 ended, and which rounds it finished."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    if variable is not None:
        environment[VARIABLE] = variable
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout.split()


@pytest.mark.parametrize(
    ("variable", "code", "rounds"),
    [
        (None, 0, "012"),
        ("node.after-lease", -signal.SIGKILL, ""),
        ("node.after-lease:2", -signal.SIGKILL, "0"),
        ("node.before-flip:3@node-1", -signal.SIGKILL, "01"),
        ("node.before-flip:4@node-1", 0, "012"),
        ("node.after-lease@node-0", 0, "012"),
        ("trainer.after-draw@node-1", 0, "012"),  # passed before the process had a name
        ("trainer.after-draw", -signal.SIGKILL, ""),
    ],
)
def test_a_process_dies_at_its_point_and_nowhere_else(variable: str | None, code: int, rounds: str) -> None:
    assert passings(variable) == (code, list(rounds))


def test_what_the_variable_says_is_read_whole() -> None:
    assert parse("store.after-index:12@store") == Plan("store.after-index", 12, "store", armed=False)
    assert parse("store.after-index") == Plan("store.after-index", 1, None, armed=True)


@pytest.mark.parametrize("text", ["", "store.nowhere", "store.after-index:0", "store.after-index:x", "x@store"])
def test_a_plan_that_cannot_happen_is_refused(text: str) -> None:
    with pytest.raises(KillPointError, match=r"store\.after-index"):
        parse(text)


def test_a_call_with_an_unknown_name_is_an_error_whenever_a_plan_is_set() -> None:
    with pytest.raises(KillPointError, match="no-such"):
        parse("store.after-index").passed("store.no-such")

"""Tests of a program: what they may ask, what comes back, and which of the two is at fault."""

from __future__ import annotations

import pytest

from async_rl.sandbox import Limits, Sandbox, Verdict

LIMITS = Limits(wall_s=30, cpu_s=10)


def judged(sandbox: Sandbox, source: str, tests: str, setup: str = "", entry_point: str = "") -> Verdict:
    return sandbox.judge(source, setup, tests, entry_point, LIMITS)


def test_every_assertion_is_counted_and_the_first_that_fails_is_told(sandbox: Sandbox) -> None:
    tests = "assert f(1) == 1\nassert f(2) == 3, 'two'\nassert f(3) == 4\nassert f(4) == 4"
    verdict = judged(sandbox, "def f(x): return x", tests)
    assert verdict[:5] == (2, 2, "wrong", "AssertionError: two", "")
    assert verdict.seconds > 0


def test_tests_in_a_function_that_takes_the_programs(sandbox: Sandbox) -> None:
    tests = "def check(candidate):\n    for n in range(4):\n        assert candidate(n, b=2) == helper(n) + 2"
    setup = "def helper(x):\n    return x\ndef f(a, b):\n    '''stub'''\n"
    assert judged(sandbox, "def f(a, b): return a + b", tests, setup, "f")[:3] == (4, 0, "passed")
    assert judged(sandbox, "def f(a, b): return a", tests, setup, "f")[:3] == (0, 4, "wrong")


def test_a_programs_exceptions_are_the_tests_to_catch(sandbox: Sandbox) -> None:
    tests = """
try:
    f("x")
    assert False, "nothing raised"
except KeyError as error:
    assert "of my own" in str(error)
assert f("y") == "y"
"""
    source = "class Own(KeyError): pass\ndef f(x):\n    if x == 'x': raise Own('of my own')\n    return x"
    assert judged(sandbox, source, tests)[:3] == (2, 0, "passed")
    assert judged(sandbox, "def f(x): return x", tests)[:4] == (1, 1, "wrong", "AssertionError: nothing raised")
    assert judged(sandbox, "def f(x): raise ValueError(x)", tests)[:4] == (0, 1, "error", "ValueError: x")


def test_what_a_program_changes_in_its_arguments_the_tests_see(sandbox: Sandbox) -> None:
    tests = (
        "x, y, z = [3, 1, 2], {1: 2}, {1}\nassert f(x, y, z) is None\nassert x == [1, 2, 3] and y == {} and z == {1, 7}"
    )
    source = "def f(x, y, z): x.sort(); y.clear(); z.add(7)"
    assert judged(sandbox, source, tests)[:3] == (2, 0, "passed")


def test_several_functions_and_iterators(sandbox: Sandbox) -> None:
    source = "def numbers(n):\n    yield from range(n)\ndef double(x): return 2 * x"
    tests = "import math\nassert [double(x) for x in numbers(3)] == [0, 2, 4]\nassert math.floor(double(0.75)) == 1"
    assert judged(sandbox, source, tests)[:3] == (2, 0, "passed")


@pytest.mark.parametrize(
    ("source", "reasons", "note"),
    [
        ("def f(:", {"syntax"}, "SyntaxError"),
        ("def g(): pass", {"undefined"}, "f is not defined"),
        ("1 / 0", {"error"}, "ZeroDivisionError"),
        ("def f(x): return x.nothing", {"error"}, "nothing"),
        ("def f(x): return f(x)", {"error"}, "RecursionError"),
        ("def f(x): return object()", {"result"}, "type object"),
        ("def f(x): return open", {"result"}, "builtin_function"),
        ("import sys\nsys.exit(0)", {"exit"}, "SystemExit"),
        ("x = bytearray(1 << 40)", {"memory"}, "MemoryError"),
        ("\0", {"syntax", "error"}, "null bytes"),  # which of them, Python's version says
        ("x = " + "-" * 100_000 + "1", {"syntax", "memory", "error", "signal"}, ""),
        ("x = " + "(" * 500 + ")" * 500, {"syntax"}, "nested"),
    ],
)
def test_why_a_program_fails_has_a_name(source: str, reasons: set[str], note: str, sandbox: Sandbox) -> None:
    verdict = judged(sandbox, source, "assert f(1) == 1")
    assert (verdict.passed, verdict.failed, verdict.broken) == (0, 1, "")
    assert verdict.reason in reasons
    assert note in verdict.note


@pytest.mark.parametrize(
    ("tests", "setup", "broken"),
    [
        ("assert f(", "", "SyntaxError"),
        ("f(1)", "", "nothing is asserted"),
        ("", "", "nothing is asserted"),
        ("assert f(1) == 1", "import nothing_of_that_name", "ModuleNotFoundError"),
        ("assert f(1) == 1", "x = (", "SyntaxError"),
    ],
)
def test_tests_that_cannot_run_are_no_programs_fault(tests: str, setup: str, broken: str, sandbox: Sandbox) -> None:
    assert broken in judged(sandbox, "def f(x): return x", tests, setup).broken


@pytest.mark.parametrize("does", ["os._exit(0)", "os.close(3)", "return object()", "raise SystemExit"])
def test_tests_that_catch_everything_do_not_pass_a_program_that_ended(does: str, sandbox: Sandbox) -> None:
    tests = "bad = False\ntry:\n    assert f(1) == 1\nexcept:\n    bad = True"
    verdict = judged(sandbox, f"import os\ndef f(x): {does}", tests)
    assert verdict[:2] == (0, 1)
    assert verdict.reason in ("exit", "result")


def test_tests_that_raise_over_an_answer_count_as_one_that_failed(sandbox: Sandbox) -> None:
    verdict = judged(sandbox, "def f(x): return None", "assert f(1) is None\nx = len(f(2))\nassert x == 1")
    assert verdict[:3] == (1, 1, "error")
    assert "NoneType" in verdict.note

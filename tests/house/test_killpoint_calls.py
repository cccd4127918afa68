"""Every kill point is reached at exactly one place in the source, under a name that its table has."""

from __future__ import annotations

import ast
from pathlib import Path

from async_rl.run.killpoints import POINTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_rl", "buffer", "inference", "trainer")


def calls_of_reached(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "reached"]


def test_points_and_calls_match_one_to_one() -> None:
    named = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for call in calls_of_reached(ast.parse(path.read_text())):
                (argument,) = call.args
                assert isinstance(argument, ast.Constant), f"{path}:{call.lineno}: a point is named by a literal"
                named.append(argument.value)
    assert sorted(named) == sorted(POINTS)

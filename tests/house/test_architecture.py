"""docs/architecture.md describes what is: its drawing equals the imports, and it names every module once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("async_rl", "buffer", "inference", "trainer")


def drawn() -> set[tuple[str, str]]:
    (drawing,) = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    return {tuple(edge) for edge in re.findall(r"^ +(\S+) --> (\S+)$", drawing, re.MULTILINE)}


def imported_by(module: str) -> set[str]:
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_the_drawing_shows_exactly_the_imports_between_the_modules_it_draws() -> None:
    edges = drawn()
    modules = {module for edge in edges for module in edge}
    real = {(module, other) for module in modules for other in imported_by(module) & modules}
    assert len(modules) > 15
    assert edges == real, {"drawn only": edges - real, "not drawn": real - edges}


def test_the_page_names_every_module_once() -> None:
    named = re.findall(r"`((?:async_rl|buffer|inference|trainer)/[\w/]+\.py)`", PAGE)
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(named) == sorted(files)

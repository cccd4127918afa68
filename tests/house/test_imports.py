"""The house's rules (docs/architecture.md), read from the sources: who may import whom, and what nobody may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_rl", "buffer", "inference", "trainer")
MAY_IMPORT = {
    "async_rl": {"async_rl"},
    "buffer": {"async_rl", "buffer"},
    "inference": {"async_rl", "inference"},
    "trainer": {"async_rl", "trainer"},
}
HEAVY = {"torch", "transformers", "peft", "safetensors", "vllm", "sglang"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}
MAX_LINES = 400
# One idea each that does not come apart: what is said, and the ends of the link; the rules composed, served, simulated;
# an engine.
LONGER = {
    "async_rl/wire/messages.py": 680,
    "async_rl/wire/client.py": 520,
    "async_rl/wire/server.py": 500,
    "buffer/replay.py": 500,
    "buffer/service.py": 450,
    "buffer/simulate.py": 510,
    "inference/node.py": 470,
    "inference/torch_engine.py": 470,
}


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    at_module_level: bool
    for_types_only: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[Import]:
    yield from _imports(path, ast.parse(path.read_text()), True, False)


def _imports(path: Path, node: ast.AST, level: bool, types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(path, child.lineno, alias.name, level, types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: relative imports hide which wing is meant"
            yield Import(path, child.lineno, str(child.module), level, types)
            yield from (Import(path, child.lineno, f"{child.module}.{a.name}", level, types) for a in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checking = isinstance(child, ast.If) and ast.unparse(child.test) in (
                "TYPE_CHECKING",
                "typing.TYPE_CHECKING",
            )
            yield from _imports(path, child, level and not inside, types or checking)


def in_policy(path: Path) -> bool:
    return path.is_relative_to(ROOT / "async_rl" / "policy")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wing_imports_the_ground_floor_and_itself_and_no_other_wing(package: str) -> None:
    found = [item for path in sources(package) for item in imports(path) if item.top in PACKAGES]
    assert [str(item) for item in found if item.top not in MAY_IMPORT[package]] == []
    assert found, f"{package} imports nothing of the house: this test looks at the wrong place"


def test_neither_the_buffer_nor_the_ground_floor_needs_torch() -> None:
    paths = [path for path in sources("async_rl", "buffer") if not in_policy(path)]
    heavy = [item for path in paths for item in imports(path) if item.top in HEAVY and not item.for_types_only]
    assert [str(item) for item in heavy] == []


def test_no_module_of_the_ground_floor_imports_its_policy_package_when_it_is_imported() -> None:
    paths = [path for path in sources("async_rl") if not in_policy(path)]
    found = [item for path in paths for item in imports(path) if item.module.startswith("async_rl.policy")]
    assert [str(item) for item in found if item.at_module_level and not item.for_types_only] == []


def test_nothing_that_runs_code_from_data_is_imported_or_called() -> None:
    for path in sources(*PACKAGES):
        assert [str(item) for item in imports(path) if item.top in UNSAFE_MODULES] == []
        calls = [
            (node.value.id, node.attr, node.lineno)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]
        assert [f"{path}:{line} {a}.{b}" for a, b, line in calls if (a, b) in UNSAFE_CALLS] == []


def test_no_file_is_longer_than_a_person_reads_at_once() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES)}
    assert {path: count for path, count in lines.items() if count > LONGER.get(path, MAX_LINES)} == {}


def test_no_package_of_the_tests_can_hide_one_of_the_house() -> None:
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))

"""Writes the tables of docs/algorithm.md: the presets from their files, bias and noise from the toy policy.

python docs/algorithm/render.py
"""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_rl.algorithm_config import AlgorithmConfig, shipped_presets
from async_rl.credit_config import CreditConfig

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "algorithm.md"
AGES = (1, 4, 16)
BESIDES: dict[str, dict[str, Any]] = {
    "whole answer, unbounded": {"ratio_level": "sequence", "ratio_high": 1e8},
    "whole answer, at most 2": {"ratio_level": "sequence", "ratio_high": 2.0},
    "run of a version, unbounded": {"ratio_level": "segment", "ratio_high": 1e8},
    "token, unbounded": {"ratio_level": "token", "ratio_high": 1e8},
}


def presets_table() -> Iterator[str]:
    yield "| preset | what it is | keys |"
    yield "|---|---|---|"
    for name, path in shipped_presets().items():
        text = path.read_text()
        says = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        keys = ", ".join(f"{key} = {_toml(value)}" for key, value in tomllib.loads(text).items())
        yield f"| `{name}` | {says} | `{keys}` |"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def bias_table() -> Iterator[str]:
    measure: Callable[..., tuple[float, float]] = runpy.run_path(str(HERE / "bandit.py"))["bias_and_noise"]
    yield "| | " + " | ".join(f"age {age}: bias | noise" for age in AGES) + " |"
    yield "|---" + "|--:" * 2 * len(AGES) + "|"
    rows = {name: AlgorithmConfig(**parts) for name, parts in BESIDES.items()}
    rows |= {f"`{name}`": AlgorithmConfig(**_token_parts(path)) for name, path in shipped_presets().items()}
    for name, algorithm in rows.items():
        cells = [f"{value:.2f}" for age in AGES for value in measure(algorithm, age)]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _token_parts(path: Path) -> dict[str, Any]:
    """A preset without what the toy problem fixes: its advantages and denominators."""
    return {key: value for key, value in tomllib.loads(path.read_text()).items() if key not in FIXED}


FIXED = {field.name for field in msgspec.structs.fields(CreditConfig)}
TABLES = {"presets": presets_table, "bias": bias_table}


def render(page: str) -> str:
    """The page with every table made anew."""
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n" + "\n".join(table()) + "\n<!-- end -->"
        page, count = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, block=block: block, page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE}: expected one place for the table {name!r}, found {count}")
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))

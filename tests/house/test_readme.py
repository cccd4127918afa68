"""What the README and CONTRIBUTING say can be typed can be typed, and the values they list are those there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from async_rl.config import AlgorithmConfig, load_config
from async_rl.run.cli import BENCHES, MODULES, _parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md")


def commands(program: str) -> list[str]:
    """Every line of a code block that starts with `program`, without its comment."""
    texts = [(ROOT / page).read_text() for page in PAGES]
    blocks = [block for text in texts for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)]
    lines = [line.strip().removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.split(" ")[0] == program]


def understands(words: list[str]) -> None:
    """A command whose options another module parses lists in its help every option that the page gives it."""
    module, rest = (BENCHES[words[1]][0], words[2:]) if words[0] == "bench" else (MODULES[words[0]][0], words[1:])
    shown = subprocess.run([sys.executable, "-P", "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for word in rest:
        assert not word.startswith("--") or word.partition("=")[0] in shown.stdout, f"{module} knows no {word}"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {shlex.split(line)[1] for line in commands("make")}
    assert {"run", "test"} <= named <= targets


@pytest.mark.parametrize("line", commands("async-rl"))
def test_every_command_is_understood_and_its_config_is_valid(line: str) -> None:
    words = shlex.split(line)[1:]
    if words[0] in MODULES or words[0] == "bench":
        understands(words)
        return
    options = _parser().parse_args(words)
    if "config" in options and options.config != "my.toml":
        load_config(options.config, options.overrides)


def test_the_table_of_algorithms_lists_every_value_there_is() -> None:
    hints = get_type_hints(AlgorithmConfig)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert set(rows) >= {"ratio_level", "treatment", "surrogate", "aggregation"}
    for key, text in rows.items():
        for value in get_args(hints[key]):
            assert f"`{value}`" in text, f"README: {key} does not mention {value}"

"""A minute of coverage-guided fuzzing of the decoders, where Atheris is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(750)]


def test_a_minute_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    script = Path(__file__).with_name("fuzz_decoders.py")
    ended = subprocess.run(
        [sys.executable, "-P", str(script), "--seconds", "60"], cwd=tmp_path, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert list(tmp_path.iterdir()) == []
    assert "Done" in ended.stderr, ended.stderr[-500:]

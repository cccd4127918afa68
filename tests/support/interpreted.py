"""Triton's kernels without a GPU: a test file runs itself once more, in a process whose Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has to be set before anything imports Triton
DEVICE = "cpu" if INTERPRETED else "cuda"

runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreted process, or on a GPU"
)


def passes_interpreted(file: str) -> None:
    """Assert that the tests of `file` pass under Triton's interpreter, and that none of the kernels' was skipped."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            file,
            "--deselect",
            f"{file}::test_interpreted",
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout

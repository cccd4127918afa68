"""Two processes on halves of every batch take the steps of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sketched_rank


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", sketched_rank.HALVES)
def test_two_ranks_take_the_steps_of_one(tmp_path: Path, case: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", sketched_rank.__file__, str(rank), str(tmp_path), case],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        alone = sketched_rank.trained(case, sketched_rank.WHOLE, together=False)
        for process in ranks:
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    first, second = (np.load(tmp_path / f"rank-{rank}.npz") for rank in range(2))
    for name, wanted in alone.items():
        np.testing.assert_array_equal(first[name], second[name])
        assert np.linalg.norm(first[name] - wanted) <= 1e-6 * np.linalg.norm(wanted), name

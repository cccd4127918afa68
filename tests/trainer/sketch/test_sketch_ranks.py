"""Two processes on halves of every batch take the steps of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import sketched_rank


def test_two_ranks_with_uneven_halves_take_the_steps_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", sketched_rank.__file__, str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        alone = sketched_rank.trained(slice(None), together=False)
        for process in ranks:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    first, second = (np.load(tmp_path / f"rank-{rank}.npz") for rank in range(2))
    for name, wanted in alone.items():
        np.testing.assert_array_equal(first[name], second[name])
        assert np.linalg.norm(first[name] - wanted) <= 1e-6 * np.linalg.norm(wanted), name

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.run.curve import smooth, write_curve

PNG = b"\x89PNG\r\n\x1a\n"


def test_smoothing_keeps_the_length_and_the_mean_of_a_constant() -> None:
    assert smooth([0.5] * 7, span=5) == [0.5] * 7
    assert smooth([0.0, 0.0, 3.0, 0.0, 0.0], span=3) == pytest.approx([0.0, 1.0, 1.0, 1.0, 0.0])


def test_a_curve_is_a_png_of_some_size(tmp_path: Path) -> None:
    records = [
        {"step": step, "version": step + 1, "reward": step / 50, "staleness_max": 3, "staleness_mean": 1.2}
        for step in range(40)
    ]
    records[0]["eval"] = {"version": 0, "reward": 0.3, "n": 8}
    records[-1]["eval"] = {"version": 40, "reward": 0.9, "n": 8}
    write_curve(records, tmp_path / "curve.png", "title", 4)
    data = (tmp_path / "curve.png").read_bytes()
    assert data.startswith(PNG)
    assert len(data) > 20_000


def test_a_run_without_steps_has_a_curve_all_the_same(tmp_path: Path) -> None:
    write_curve([], tmp_path / "curve.png", "nothing happened", 0)
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)

"""A benchmark's arms are interleaved, judged within their round, and comparable with an earlier file."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from async_rl.errors import AsyncRLError
from async_rl.run.bench import Arm, Cell, Metric, bench_main, bench_parser, finish_bench, ratios, run_bench
from async_rl.run.bench_pipeline import WARM_UP, against_ideal, ideal_speedup, measures_of

METRICS = (Metric("per_s", "per s", "higher"), Metric("cpu_us", "CPU µs", "lower"))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def document(rounds: int = 3) -> tuple[dict[str, Any], list[str]]:
    """Two arms whose speed drifts from round to round, as a shared machine's does; ours is always twice the other's."""
    order: list[str] = []

    def arm(name: str, factor: float) -> Arm:
        def measure() -> dict[str, float]:
            order.append(name)
            drift = 10.0 ** order.count(name)
            return {"per_s": factor * drift, "cpu_us": 1 / (factor * drift)}

        return Arm(name, measure)

    cell = Cell("a cell", [arm("raw", 1.0), arm("ours", 2.0)], "raw")
    return run_bench("transport", [cell], METRICS, rounds, {"tokens": 8}, quiet()), order


def options(*given: str) -> argparse.Namespace:
    return bench_parser("transport", "…", 3).parse_args(list(given))


def text_of(made: dict[str, Any], *given: str) -> str:
    console = quiet()
    finish_bench(made, options(*given), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_every_round_runs_each_arm_once_in_a_rotated_order() -> None:
    _, order = document(rounds=4)
    assert order == ["raw", "ours", "ours", "raw", "raw", "ours", "ours", "raw"]


def test_ratios_are_within_a_round_so_drift_does_not_count() -> None:
    made, _ = document()
    cell = made["cells"][0]
    assert ratios(cell, "ours", METRICS[0]._asdict()) == pytest.approx([2.0] * 3)


def test_a_ratio_above_1_is_better_also_where_less_is_better() -> None:
    made, _ = document()
    assert median(ratios(made["cells"][0], "ours", METRICS[1]._asdict())) == pytest.approx(2.0)


def test_the_file_holds_every_measurement_and_can_be_compared_with(tmp_path: Path) -> None:
    made, _ = document()
    file = tmp_path / "new" / "transport.json"
    assert "written" in text_of(made, "--json", str(file))
    old = json.loads(file.read_text())
    assert old["cells"][0]["arms"]["ours"]["per_s"] == [20.0, 200.0, 2000.0]
    assert old["machine"]["cores"] >= 1
    text = text_of(made, "--compare", str(file))
    assert "now / then" in text
    assert "1.00" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{}", "not a file of"), ("[", "not a file of"), ('{"bench": "push"}', "bench 'push'")],
)
def test_a_file_that_cannot_be_compared_with_is_refused_before_anything_is_measured(
    content: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr("sys.argv", ["bench", "--compare", str(file)])

    def measure(_options: argparse.Namespace, _console: Console) -> None:
        raise AsyncRLError("measured")

    with pytest.raises(SystemExit) as ended:
        bench_main(measure, bench_parser("transport", "…", 3))
    assert ended.value.code == 1
    assert words in capsys.readouterr().err


def test_a_cell_whose_baseline_is_none_of_its_arms_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="baseline"):
        run_bench("x", [Cell("a", [Arm("ours", dict)], "raw")], METRICS, 1, {}, quiet())


# --- pipeline --------------------------------------------------------------------------------------------------------


def run_records(steps: int, step_s: float) -> list[dict[str, Any]]:
    """A run whose first steps are slow; its one node works half of the time after them."""
    records: list[dict[str, Any]] = []
    now = 0.0
    for step in range(steps):
        now += step_s if step >= WARM_UP else 10 * step_s
        records += [
            {
                "step": step, "version": step + 1, "time_s": now, "reward": 0.5, "rollout_s": 0.3, "cycle_s": 0.6,
                "draw_wait_s": 0.25 * step_s, "step_s": step_s, "staleness_mean": 1.0,
            },
            {"time_s": now, "pools": {"nodes": [{"name": "n", "busy_s": now / 2, "alive_s": now}]}},
        ]  # fmt: skip
    return records


def test_speed_leaves_out_the_warm_up() -> None:
    measures = measures_of(run_records(30, step_s=0.8), bound=4)
    assert measures["steps_per_s"] == pytest.approx(1 / 0.8)
    assert measures["inference_idle"] == pytest.approx(0.5)
    assert measures["trainer_idle"] == pytest.approx(0.25)


def test_the_ideal_is_what_pools_that_never_wait_would_reach() -> None:
    synchronous = measures_of(run_records(30, step_s=0.9), bound=0)
    assert ideal_speedup(synchronous) == pytest.approx(0.9 / 0.6)
    arms = {
        "bound 0": {key: [value] for key, value in synchronous.items()},
        "bound 4": {"steps_per_s": [1.2 * synchronous["steps_per_s"]]},
    }
    ideal = against_ideal({"baseline": "bound 0", "arms": arms})
    assert ideal["share"]["bound 4"] == pytest.approx([1.2 / 1.5])

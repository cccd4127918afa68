"""The staleness benchmark: what it runs, what it keeps of an earlier file, and what its runs come down to."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import load_config
from async_rl.errors import AsyncRLError
from async_rl.run.bench import bench_tables, ratios
from async_rl.run.bench_staleness import (
    Runner,
    _numbers,
    document_of,
    finished_runs,
    is_run,
    main,
    without_outdated,
    write,
)
from async_rl.run.bench_staleness_cells import Cell, Outcome, Scale, evaluated_at, overrides_of
from async_rl.run.bench_staleness_plan import CORRECTIONS, UNCORRECTED, Grid, plan
from async_rl.run.bench_staleness_results import (
    ON_POLICY,
    Place,
    final,
    lowest,
    mean_and_error,
    over_training,
    places,
    rows,
)

CLIP = "PPO clip, token, 0.8 to 1.28"


def run(correction: str, lag: int, seed: int, *evals: float, rate: float = 5e-4, reuse: int = 1) -> dict[str, Any]:
    cell = Cell(
        correction=correction,
        settings=dict(CORRECTIONS[correction]),
        lag=lag,
        reuse=reuse,
        learning_rate=rate,
        seed=seed,
    )
    outcome = Outcome(evals=[(10 * index, reward) for index, reward in enumerate(evals)])
    return msgspec.to_builtins(cell) | msgspec.to_builtins(outcome)


RUNS = [
    run(UNCORRECTED, 0, 0, 0.5, 0.6, 0.7, 0.8),
    run(UNCORRECTED, 0, 1, 0.5, 0.7, 0.8, 0.9),
    run(UNCORRECTED, 16, 0, 0.5, 0.3, 0.1, 0.2),
    run(UNCORRECTED, 16, 1, 0.5, 0.3, 0.6, 0.9),
    run(CLIP, 16, 1, 0.5, 0.4, 0.6, 0.8),
    run(CLIP, 16, 0, 0.5, 0.6, 0.6, 0.6),
    run(CLIP, 4, 0, 0.5, 0.6, 0.6, 0.7),
]


# --- what is run -----------------------------------------------------------------------------------------------------


def test_the_plan_has_every_run_once_and_the_largest_lag_of_all_corrections_first() -> None:
    cells = plan(Grid())
    keys = [(cell.correction, cell.lag, cell.reuse, cell.learning_rate, cell.seed) for cell in cells]
    assert len(set(keys)) == len(keys)
    first = cells[: 1 + len(CORRECTIONS)]
    assert [(cell.correction, cell.lag) for cell in first] == [(UNCORRECTED, 0), *((name, 16) for name in CORRECTIONS)]
    assert {(name, 4, 1, 5e-4, 2) for name in CORRECTIONS} <= set(keys)
    assert {cell.reuse for cell in cells if cell.lag == 0} == {1, 2, 4}
    assert {cell.learning_rate for cell in cells} == {5e-4, 2e-3, 1e-4}


def test_a_plan_without_lags_has_only_what_is_on_policy_or_reused() -> None:
    cells = plan(Grid(lags=(), seeds=(0,)))
    assert {(cell.lag, cell.reuse) for cell in cells} == {(0, 1), (0, 2), (0, 4)}
    assert {cell.correction for cell in cells if cell.reuse == 1} == {UNCORRECTED}


def test_every_run_is_a_valid_config_whose_bound_is_the_age_of_its_oldest_token() -> None:
    for cell in plan(Grid(seeds=(3,))):
        config = load_config("quickstart", overrides_of(Scale(), cell))
        assert config.buffer.max_staleness == cell.lag + cell.reuse - 1
        assert config.trainer.learning_rate == cell.learning_rate
        assert (config.trainer.warmup_steps, config.trainer.final_learning_rate) == (0, 1.0)
        assert config.run.seed == 3
        assert (config.algorithm.advantage, config.algorithm.aggregation) == ("grpo", "token_mean")
        for key, value in cell.settings.items():
            assert getattr(config.algorithm, key.removeprefix("algorithm.")) == value


def test_corrections_differ() -> None:
    configs = [
        load_config("quickstart", overrides_of(Scale(), cell)).algorithm for cell in plan(Grid(seeds=(0,), lags=(16,)))
    ]
    distinct = {msgspec.json.encode(msgspec.structs.replace(config, preset="")) for config in configs}
    assert len(distinct) == len(CORRECTIONS)


def test_an_unknown_correction_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(AsyncRLError, match=r"there is no 'uncorected'; did you mean 'uncorrected'\?"):
        plan(Grid(corrections=("uncorected",)))


@given(st.integers(1, 200), st.integers(1, 50))
def test_the_first_and_the_last_version_are_evaluated_and_the_last_ones_more_densely(updates: int, every: int) -> None:
    versions = evaluated_at(Scale(updates=updates, eval_every=every))
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, updates)
    assert all(0 <= version <= updates for version in versions)
    if every >= 2 and updates >= 2 * every:
        assert versions[-3:] == [updates - every, updates - every // 2, updates]


@pytest.mark.parametrize("text", ["a", "1,b", "0", ","])
def test_lists_of_numbers_are_refused_when_they_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected numbers"):
        _numbers(int, 1)(text)
    assert _numbers(int, 1)("4,16") == [4, 16]
    assert _numbers(int, 1)("") == []


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_what_a_file_holds_is_not_run_again_unless_its_correction_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.json"
    assert finished_runs(path, Scale()) == []
    changed = RUNS[4] | {"settings": {**RUNS[4]["settings"], "algorithm.ratio_high": 1.2}}
    write(path, document_of([*RUNS[:4], changed], Scale(), 2))
    kept = without_outdated(finished_runs(path, Scale()))
    assert kept == json.loads(json.dumps(RUNS[:4]))
    cells = plan(Grid(seeds=(0, 1), lags=(16,), rates=(5e-4,), reuses=()))
    left = [(cell.correction, cell.lag, cell.seed) for cell in cells if not is_run(cell, kept)]
    assert (CLIP, 16, 1) in left
    assert not {(UNCORRECTED, 0, 0), (UNCORRECTED, 0, 1), (UNCORRECTED, 16, 0), (UNCORRECTED, 16, 1)} & set(left)
    assert len(left) == len(cells) - 4


@pytest.mark.timeout(300)
def test_the_command_prints_what_the_file_holds_and_starts_nothing_when_nothing_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    held = [run(name, lag, seed, 0.5, 0.6) for name, lag in ((UNCORRECTED, 0), (CLIP, 3)) for seed in (0, 1)]
    write(path, document_of(held, Scale(updates=9), 2))
    given = ["--lags", "3", "--rates", "5e-4", "--reuses", "", "--corrections", CLIP, "--updates", "9", "--rounds", "2"]
    command = [sys.executable, "-P", "-m", "async_rl.run.bench_staleness", *given, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "0 of 4 runs to do" in done.stdout
    assert "lag 3, learning rate 0.0005" in done.stdout
    assert json.loads(path.read_text())["runs"] == json.loads(json.dumps(held))
    cells = json.loads(path.read_text())["cells"]
    subprocess.run([*command, "--rounds", "1"], check=True, capture_output=True, timeout=100)
    fewer = json.loads(path.read_text())
    assert (fewer["settings"]["rounds"], fewer["cells"]) == (2, cells)
    refused = subprocess.run([*command, "--corrections", "clip"], capture_output=True, text=True, timeout=100)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --corrections: there is no 'clip'")


@pytest.mark.parametrize("option", ["--jobs", "--updates", "--rounds"])
def test_none_of_what_is_counted_is_refused(option: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bench staleness", option, "0"])
    with pytest.raises(SystemExit):
        main()
    assert f"argument {option}: '0' is not a number of at least 1" in capsys.readouterr().err


def test_a_worker_that_cannot_even_start_its_process_ends_the_wait_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        Runner(Scale(), 1).work_off(plan(Grid(seeds=(0,)))[:2], lambda *_: None)


def test_a_file_of_runs_of_another_size_or_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    write(path, document_of(RUNS, Scale(updates=7), 2))
    with pytest.raises(AsyncRLError, match=r"--json .*runs.json holds runs of another size, .*'updates': 7"):
        finished_runs(path, Scale())
    path.write_text('{"bench": "rollout"}')
    with pytest.raises(AsyncRLError, match="a file that this benchmark did not write"):
        finished_runs(path, Scale())


# --- what it comes down to -------------------------------------------------------------------------------------------


def test_a_run_s_result_is_the_mean_of_its_last_three_evaluations() -> None:
    made = run(CLIP, 16, 0, 0.9, 0.1, 0.5, 0.6)
    assert final(made) == pytest.approx((0.1 + 0.5 + 0.6) / 3)
    assert lowest(made) == 0.1
    uneven = made | {"evals": [(0, 0.2), (10, 0.4), (15, 0.8)]}
    assert over_training(uneven) == pytest.approx(np.trapezoid([0.2, 0.4, 0.8], [0, 10, 15]) / 15)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_standard_error_is_that_of_the_mean(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), abs=1e-12)


def test_one_value_has_no_standard_error() -> None:
    mean, error = mean_and_error([0.5])
    assert mean == 0.5
    assert math.isnan(error)


def test_rows_compare_each_correction_with_on_policy_learning_of_the_same_seeds() -> None:
    best, clip, uncorrected = rows(RUNS, Place(16, 1, 5e-4))
    assert (best.correction, best.n, best.gap) == (ON_POLICY, 2, 0.0)
    assert best.final == pytest.approx(0.75)
    assert (clip.correction, clip.n, clip.below) == (CLIP, 2, 0)
    assert clip.final == pytest.approx(0.6)
    assert clip.gap == pytest.approx(((0.6 - 0.7) + (0.6 - 0.8)) / 2)
    assert clip.gap_error == pytest.approx(np.std([-0.1, -0.2], ddof=1) / np.sqrt(2))
    assert (uncorrected.correction, uncorrected.below, uncorrected.lowest) == (UNCORRECTED, 1, 0.1)
    assert (uncorrected.alarmed, uncorrected.watched, uncorrected.failed) == (0, 2, 0)
    worse = [
        each | {"alarm_at": each["seed"], "error": "not finite"} if each["correction"] == CLIP else each
        for each in RUNS
    ]
    assert [(row.alarmed, row.failed) for row in rows(worse, Place(16, 1, 5e-4))] == [(0, 0), (2, 2), (0, 0)]


def test_the_shared_frame_has_what_every_seed_was_run_for_and_nothing_else() -> None:
    document = document_of(RUNS, Scale(), 2)
    assert places(RUNS) == [Place(16, 1, 5e-4), Place(4, 1, 5e-4)]
    (cell,) = document["cells"]
    assert cell["cell"] == "lag 16, learning rate 0.0005"
    assert cell["arms"].keys() == {ON_POLICY, UNCORRECTED, CLIP}
    assert cell["arms"][CLIP]["final"] == pytest.approx([0.6, 0.6])
    assert ratios(cell, CLIP, document["metrics"][0]) == pytest.approx([0.6 / 0.7, 0.6 / 0.8])
    assert document["runs"] == RUNS
    assert document_of([*RUNS, run(CLIP, 16, 2, 0.5, 0.7)], Scale(), 2)["cells"] == document["cells"]
    bench_tables(document)

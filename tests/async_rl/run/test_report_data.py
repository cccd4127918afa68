from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import eval_record, finish_run, make_directory, make_run, pools_record, step_record

from async_rl.errors import AsyncRLError
from async_rl.run.metrics import MetricsWriter
from async_rl.run.report.run_data import pools_of, read_run


def test_a_run_is_running_while_it_is_held_then_stopped_and_finished_with_its_summary(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    make_run(directory, steps=5)
    with directory.hold():
        assert read_run(directory).state == "running"
    assert read_run(directory).state == "stopped"
    finish_run(directory)
    assert read_run(directory).state == "finished"


def test_a_summary_of_an_earlier_end_is_not_the_runs_summary(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    make_run(directory, steps=5)
    finish_run(directory)
    with MetricsWriter(directory.metrics_path) as metrics:
        metrics.write(step_record(5))
    run = read_run(directory)
    assert run.state == "stopped"
    assert run.summary["steps"] == 6


def test_the_summary_so_far_has_the_figures_of_both_pools(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    make_run(directory, steps=10)
    summary = read_run(directory).summary
    assert summary["idle_fraction"] == {"inference": pytest.approx(0.25), "trainer": pytest.approx(0.25)}
    assert summary["ledger_balances"] is True
    assert summary["push_ms"] == {"p50": 20.0, "p99": 40.0}
    assert summary["tokens_per_second"]["train"] == pytest.approx(320)


def test_what_was_recorded_after_the_checkpoint_a_run_went_on_from_does_not_count(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    make_run(directory, steps=10)
    with MetricsWriter(directory.metrics_path, keep_before_step=4) as metrics:
        metrics.write(pools_record(4))
        metrics.write(step_record(4, reward=0.125))
    run = read_run(directory)
    assert [step["step"] for step in run.steps] == [0, 1, 2, 3, 4]
    assert run.steps[-1]["reward"] == 0.125
    assert [item["version"] for item in run.evals] == [0]
    assert [line["time_s"] for line in run.pools] == [0, 1, 2, 3, 4]
    assert run.seconds == 5


def test_an_evaluation_without_a_reward_is_none(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    with MetricsWriter(directory.metrics_path) as metrics:
        metrics.write({"time_s": 1.0, "eval": {"version": 0, "reward": float("nan"), "n": 0, "cancelled": 8}})
    assert read_run(directory).evals == []


def test_lines_of_the_buffers_view_rise_in_time_and_the_later_counts() -> None:
    lines = [pools_record(second) for second in (0, 1, 2, 3, 1, 2)]
    lines[-2]["pools"]["waiting"] = "again"
    found = pools_of([*lines, eval_record(0)])
    assert [line["time_s"] for line in found] == [0, 1, 2]
    assert found[1]["pools"]["waiting"] == "again"


def test_a_run_that_has_only_begun_is_read(tmp_path: Path) -> None:
    run = read_run(make_directory(tmp_path / "run"))
    assert (run.steps, run.evals, run.pools, run.samples) == ([], [], [], [])
    assert (run.seconds, run.bound, run.name) == (0.0, 4, "made")


def test_keys_of_another_version_do_not_hinder(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    text = directory.config_path.read_text()
    directory.config_path.write_text(text.replace("[buffer]", "[buffer]\nlong_gone = 1") + "\n[more]\nkey = 2\n")
    config = read_run(directory).config
    assert config["buffer"]["long_gone"] == 1
    assert config["more"] == {"key": 2}


def test_a_file_that_cannot_be_understood_is_named(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    directory.summary_path.write_text("{")
    with pytest.raises(AsyncRLError, match=r"summary\.json cannot be read"):
        read_run(directory)
    directory.summary_path.write_text(json.dumps({}))
    directory.config_path.write_text("[run")
    with pytest.raises(AsyncRLError, match=r"config\.toml is not valid TOML"):
        read_run(directory)
    directory.config_path.write_text('[buffer]\nmax_staleness = "four"\n')
    with pytest.raises(AsyncRLError, match=r"buffer\.max_staleness is 'four'"):
        read_run(directory)
    directory.config_path.unlink()
    with pytest.raises(AsyncRLError, match=r"config\.toml cannot be read"):
        read_run(directory)

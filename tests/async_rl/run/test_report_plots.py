from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from made_runs import BOUND, control_record, make_directory, make_run, pools_record, step_record

from async_rl.run.report import learning_plots, pool_plots
from async_rl.run.report.control_plots import control_plots
from async_rl.run.report.eval_section import is_worth_it, pass_plot, sets_html
from async_rl.run.report.plot import Plot, age_colour, chunks_of
from async_rl.run.report.run_data import RunData, read_run
from async_rl.run.report.timeline import timeline


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    directory = make_directory(tmp_path / "run")
    make_run(directory)
    return read_run(directory)


def all_plots(run: RunData) -> list[Plot]:
    line = timeline(run.steps, run.pools, run.seconds)
    of_run = (
        learning_plots.reward_plot, learning_plots.length_plot, learning_plots.optimiser_plot,
        learning_plots.staleness_plot, learning_plots.age_split_plot, learning_plots.ratio_plot,
        learning_plots.age_health_plot,
        pool_plots.step_plot, pool_plots.journey_plot,
    )  # fmt: skip
    return [
        *(make(run) for make in of_run),
        *(make(line) for make in (pool_plots.idle_plot, pool_plots.rate_plot, pool_plots.work_plot)),
        *(make(run, line) for make in (pool_plots.push_plot, pool_plots.buffer_plot)),
    ]


def plot(run: RunData, key: str) -> Plot:
    (found,) = (plot for plot in all_plots(run) if plot.key == key)
    return found


def trace(of: Plot, start: str) -> dict[str, Sequence[float]]:
    (found,) = (trace for trace in of.data if trace["name"].startswith(start))
    return found


def test_every_figure_is_one_that_the_library_accepts_and_json_can_hold(run: RunData) -> None:
    plots = all_plots(run)
    assert len({plot.key for plot in plots}) == 14
    for found in plots:
        assert found.data, found.key
        go.Figure(data=found.data, layout=found.layout)  # raises for a property that it does not know
        json.dumps(found.data, allow_nan=False)


def test_of_a_run_that_recorded_nothing_nothing_is_drawn(tmp_path: Path) -> None:
    empty = read_run(make_directory(tmp_path / "run"))
    assert [found.key for found in all_plots(empty) if found.data] == []


def test_a_run_of_long_ago_is_drawn_as_far_as_it_was_recorded(run: RunData) -> None:
    keys = ("step", "version", "reward", "staleness_max", "staleness_mean", "tokens", "step_s", "draw_wait_s", "time_s")
    old = replace(run, steps=[{key: step[key] for key in keys} for step in run.steps], pools=[], evals=[])
    drawn = {found.key for found in all_plots(old) if found.data}
    assert drawn == {"reward", "staleness", "step", "idle", "rates", "work"}


def test_one_step_can_be_seen(run: RunData) -> None:
    single = replace(run, steps=run.steps[:1], seconds=1.0)
    assert trace(plot(single, "ratios"), "k3")["mode"] == "markers"


def test_evaluations_have_their_intervals_only_where_rewards_are_rates(run: RunData) -> None:
    bars = trace(plot(run, "reward"), "evaluation")["error_y"]
    assert len(bars["array"]) == len(run.evals) == 3
    beyond = replace(run, steps=[step_record(0, reward=3.0)])
    assert "error_y" not in trace(plot(beyond, "reward"), "evaluation")


def test_the_shares_of_ages_are_those_of_the_trained_tokens(run: RunData) -> None:
    mixed = replace(run, steps=[step_record(0, staleness_tokens=[30, 0, 10], staleness_max=2)])
    staleness = plot(mixed, "staleness")
    assert trace(staleness, "age 0")["y"] == [0.75]
    assert trace(staleness, "age 2")["y"] == [0.25]
    assert trace(staleness, "bound")["y"] == [BOUND, BOUND]


def test_the_health_by_age_is_the_mean_over_the_tokens_of_each_age(run: RunData) -> None:
    first = step_record(0, staleness_tokens=[30, 10]) | {"age_k3/0": 0.0, "age_kept/0": 1.0, "age_k3/1": 0.4}
    second = step_record(0, staleness_tokens=[0, 30]) | {"age_k3/1": 0.8, "age_kept/1": 0.25}
    drawn = plot(replace(run, steps=[first, second]), "age_health")
    assert trace(drawn, "k3")["x"] == [0, 1]
    assert trace(drawn, "k3")["y"] == [0.0, 0.7]
    assert trace(drawn, "outside")["y"] == [0.0, 0.75]


def test_the_age_at_the_draw_is_the_mean_over_attempts_of_its_two_parts(run: RunData) -> None:
    mixed = replace(run, steps=[step_record(0, in_flight_ages=[1, 3], in_queue_ages=[2, 0, 2])])
    split = plot(mixed, "age_split")
    assert trace(split, "in flight")["y"] == [0.75]
    assert trace(split, "in the queue")["y"] == [1.0]


def test_what_was_clipped_is_what_was_not_kept(run: RunData) -> None:
    assert trace(plot(run, "ratios"), "outside")["y"][0] == pytest.approx(0.1)


def test_a_long_run_is_thinned_and_keeps_its_extremes_of_age(run: RunData) -> None:
    steps = [step_record(step, staleness_max=7 if step == 4321 else 1) for step in range(10_000)]
    long = replace(run, steps=steps, pools=[pools_record(second) for second in range(10_000)], seconds=10_000.0)
    plots = all_plots(long)
    assert max(trace(plot(long, "staleness"), "oldest")["y"]) == 7
    assert len(json.dumps([found.data for found in plots])) < 1_000_000
    assert max(len(trace["x"]) for found in plots for trace in found.data) <= 600


@pytest.mark.parametrize("count", [0, 1, 7, 400, 401, 999])
def test_chunks_hold_every_step_once_and_in_order(count: int) -> None:
    steps = [{"step": step} for step in range(count)]
    chunks = chunks_of(steps)
    assert [step for chunk in chunks for step in chunk] == steps
    assert len(chunks) <= 400
    assert all(chunks)


def test_names_of_machines_are_no_markup(run: RunData) -> None:
    view = pools_record(3)
    view["pools"]["nodes"][0]["name"] = "<b onclick=x>"
    work = plot(replace(run, pools=[pools_record(0), view]), "work")
    assert "<b" not in json.dumps(work.data) + json.dumps(work.layout)


def test_ages_are_told_apart_up_to_the_bound_and_beyond_it_all_alike() -> None:
    colours = [age_colour(age, 8) for age in range(9)]
    assert len(set(colours)) == 9
    assert age_colour(20, 8) == colours[8]
    assert age_colour(0, 0) == colours[0]


def test_an_evaluation_of_a_version_has_its_place_among_the_steps(run: RunData) -> None:
    assert trace(plot(run, "reward"), "evaluation")["x"] == [0, 10, 20]


def test_the_adaptive_bound_is_drawn_where_there_is_one(tmp_path: Path, run: RunData) -> None:
    assert not [found for found in plot(run, "staleness").data if found["name"] == "adaptive bound"]
    pools = [
        {**look, "pools": {**look["pools"], "confirmed": version, "adaptive_bound": 4 - version // 10}}
        for version, look in enumerate(run.pools)
    ]
    drawn = trace(plot(replace(run, pools=pools), "staleness"), "adaptive bound")
    assert (drawn["x"][0], drawn["y"][0], drawn["y"][-1]) == (0, 4, 2)


def controlled(run: RunData, steps: int = 20) -> RunData:
    return replace(run, steps=[control_record(step) for step in range(steps)])


def test_a_run_without_step_control_has_no_plots_of_it(run: RunData) -> None:
    assert control_plots(run) == []


def test_steps_that_were_controlled_are_drawn_against_what_was_predicted(run: RunData) -> None:
    calibration, lengths = control_plots(controlled(run))
    points = trace(calibration, "a step")
    assert (len(points["x"]), len(points["y"])) == (20, 20)
    line = trace(calibration, "realised as predicted")
    assert line["x"] == line["y"] == [min(*points["x"], *points["y"]), max(*points["x"], *points["y"])]
    assert trace(lengths, "length")["y"][0] == pytest.approx(0.5)
    assert trace(lengths, "budget")["y"] == sorted(trace(lengths, "budget")["y"], reverse=True)
    for found in (calibration, lengths):
        go.Figure(data=found.data, layout=found.layout)
        json.dumps(found.data, allow_nan=False)


def test_steps_that_moved_nothing_have_no_place_on_a_logarithmic_axis(run: RunData) -> None:
    still = control_record(3) | {"predicted_kl": 0.0, "applied_kl": 0.0, "realised_kl": 0.0}
    calibration, lengths = control_plots(replace(run, steps=[still]))
    assert calibration.data == []
    assert trace(lengths, "realised")["y"] == [None]


def test_a_long_controlled_run_is_thinned(run: RunData) -> None:
    drawn = control_plots(controlled(run, 5000))
    assert max(len(trace["x"]) for found in drawn for trace in found.data) <= 400


def test_how_far_a_sketch_goes_is_called_what_it_is(run: RunData) -> None:
    steps = [{key: value for key, value in step.items() if key != "learning_rate"} for step in run.steps]
    sketched = replace(run, steps=[step | {"update_ratio": 6e-5} for step in steps])
    assert trace(plot(sketched, "optimiser"), "update ratio")["y"][0] == 6e-5


def test_each_set_of_evaluation_has_a_line_of_means_and_one_for_each_k_of_pass_at_k(run: RunData) -> None:
    def evaluated(name: str, version: int) -> dict[str, Any]:
        share = {"value": 0.5, "interval": [0.4, 0.7], "n": 30}
        return {"version": version, "set": name, "reward": 0.3, "interval": [0.2, 0.4], "n": 120, "instances": 30,
                "samples": 4, "cancelled": 2, "pass": {"1": share, "4": share}}  # fmt: skip

    sets = {name: [evaluated(name, version) for version in (0, 10)] for name in ("easy", "<hard>")}
    several = replace(run, evals=sets["easy"], eval_sets=sets)
    assert trace(plot(several, "reward"), "evaluation: &lt;hard&gt;")["error_y"]["array"] == [0.1, 0.1]
    names = [each["name"] for each in pass_plot(several).data]
    assert names == ["easy, pass@1", "easy, pass@4", "&lt;hard&gt;, pass@1", "&lt;hard&gt;, pass@4"]
    assert all(each["error_y"]["arrayminus"] == [0.1, 0.1] for each in pass_plot(several).data)
    assert "&lt;hard&gt;" in sets_html(several)
    assert "<hard>" not in sets_html(several)
    assert is_worth_it(several)
    assert not is_worth_it(run)

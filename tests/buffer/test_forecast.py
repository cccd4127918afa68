"""`async-rl simulate`: what it needs, what it says, and that its short cut for large runs changes little."""

from __future__ import annotations

import json
import runpy
import statistics
from pathlib import Path

import pytest

from buffer.forecast import ENOUGH_EVENTS, RUNS, average_forecast, averaged, forecast, main
from buffer.scenario import Constant, Lognormal, Scenario, Speed, TrainerSpeed

DOCS = Path(__file__).resolve().parents[2] / "docs" / "simulate"
FITTED = DOCS / "fitted"
GIVEN = ("--tokens-per-second", "2000", "--lengths", "300,0.6", "--train-seconds", "3")
SMALL = ("--steps", "12", "--set", "buffer.groups_per_step=4", "--set", "inference.max_new_tokens=1000",
         "--set", "inference.max_context=1100", "--set", "run.eval_every=0", "--set", "inference.slots=16")  # fmt: skip


def run(tmp_path: Path, *options: str) -> dict[str, object]:
    path = tmp_path / "forecast.json"
    assert main(["quickstart", *GIVEN, *SMALL, *options, "--json", str(path)]) == 0
    return dict(json.loads(path.read_text()))


def test_without_speeds_it_names_what_is_missing(capsys):
    assert main(["quickstart"]) == 1
    assert "--from DIR" in (said := capsys.readouterr().err)
    assert all(option in said for option in ("--lengths", "--tokens-per-second", "--train-seconds"))
    assert main(["quickstart", "--lengths", "10,0.5", "--train-seconds", "1"]) == 1
    assert (said := capsys.readouterr().err).rstrip().endswith("or --tokens-per-second")
    assert main(["quickstart", "--from", "nowhere"]) == 1
    assert "no metrics.jsonl" in capsys.readouterr().err


def test_groups_of_nodes_are_one_kind_of_node_or_are_refused(tmp_path, capsys):
    groups = 'inference.group=[{name = "a", nodes = 2}, {name = "b", engine = "vllm"}]'
    run(tmp_path, "--set", groups, "--nodes", "3")
    assert "the nodes of 2 groups are taken to be equally fast" in capsys.readouterr().out
    differing = 'inference.group=[{name = "a"}, {name = "b", slots = 3}]'
    assert main(["quickstart", *GIVEN, *SMALL, "--set", differing]) == 1
    assert "slots = 16, 3: a forecast knows one kind of node" in capsys.readouterr().err


def test_a_cap_that_is_lifted_leaves_nothing_known_of_the_nodes(capsys):
    """The kept run's nodes were held back by a cap: what they could do without it was never seen."""
    assert main(["quickstart", "--from", str(FITTED)]) == 1
    said = capsys.readouterr().err
    assert "held back by inference.max_tokens_per_second" in said
    assert "give --tokens-per-second" in said


def test_what_differs_from_the_measured_run_is_said(capsys):
    changes = ("trainer.rank=8", "task.digits=9", "inference.max_tokens_per_second=100", "run.eval_every=0")
    options = [part for change in changes for part in ("--set", change)]
    assert main(["quickstart", "--from", str(FITTED), *options, "--nodes", "1", "--steps", "4"]) == 0
    assert "had another [task], trainer.rank" in capsys.readouterr().out


def test_the_documented_forecasts_come_out_again(tmp_path):
    """docs/simulate/validation.md: after a change of the rules or of the world, `validate.py` has to be run again."""
    kept = json.loads((DOCS / "validation.json").read_text())
    base = runpy.run_path(str(DOCS / "real.py"))["settings"]
    for number, row in enumerate(kept):
        said = tmp_path / f"{number}.json"
        options = [*base(row["changes"]), "--nodes", str(row["changes"]["inference.nodes"]), "--json", str(said)]
        assert main(["quickstart", "--from", str(FITTED), *options]) == 0
        (now,) = json.loads(said.read_text())["forecasts"]
        for key in ("steps_per_s", "staleness_mean"):
            assert now[key] == pytest.approx(row["predicted"][key], rel=0.02), (row["run"], key)


def test_every_number_of_nodes_is_forecast_and_written(tmp_path, capsys):
    written = run(tmp_path, "--nodes", "1,3")
    one, three = written["forecasts"]
    assert (one["nodes"], three["nodes"]) == (1, 3)
    assert one["steps"] == three["steps"] == 12
    assert 0 < one["steps_per_s"] < three["steps_per_s"] <= 1 / 3
    assert one["trainer_idle"] > three["trainer_idle"]
    assert one["wasted"] < 0.01
    assert one["dropped"] == {}
    assert written["rules"]["groups_per_step"] == 4
    assert written["scenario"]["lengths"]["most"] == 1000
    assert "idle trainer" in capsys.readouterr().out


def test_the_same_seed_says_the_same_and_another_something_else(tmp_path):
    said = [run(tmp_path, "--nodes", "2", "--seed", seed)["forecasts"][0]["virtual_s"] for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


def test_a_forecast_is_the_mean_of_runs_that_differ_by_chance(tools):
    """So the means lie closer together than the runs do."""
    rules = tools.rules(steps=30, groups_per_step=4, group_size=8, max_staleness=4, lease_timeout=1e5)
    scenario = Scenario(
        nodes=1, slots=48, lengths=Lognormal(10, 0.4), speed=Speed(tokens_per_second=500.0), push_s=Constant(0.1),
        trainer=TrainerSpeed(Constant(0.2)),
    )  # fmt: skip
    means = [average_forecast(rules, scenario._replace(seed=seed)) for seed in range(4)]
    assert {each.runs for each in means} == {RUNS}
    ages = [each.staleness_mean for each in means]
    assert 0 < statistics.stdev(ages) < 0.7 * statistics.fmean(each.staleness_spread for each in means)
    single = forecast(rules, scenario)
    assert (single.runs, single.staleness_spread) == (1, 0.0)
    assert averaged([single]) == single


def test_the_mean_of_forecasts_adds_up_what_was_spent_and_keeps_the_worst(tools):
    rules = tools.rules(steps=4, groups_per_step=2, group_size=2, max_staleness=1)
    one = forecast(rules, Scenario())._replace(steps_per_s=1.0, staleness_max=1, dropped={"stale": 3.0}, events=10)
    both = averaged([one, one._replace(steps_per_s=2.0, staleness_max=2, dropped={}, events=20, error="stuck")])
    assert (both.steps_per_s, both.staleness_max, both.dropped) == (1.5, 2, {"stale": 1.5})
    assert (both.events, both.error, both.runs) == (30, "stuck", 2)
    assert both.steps_per_s_spread == pytest.approx(0.5**0.5)


def test_a_run_that_is_long_in_itself_is_simulated_once(tools):
    rules = tools.rules(steps=1000, groups_per_step=16, group_size=4, max_staleness=4, lease_timeout=1e5)
    scenario = Scenario(nodes=8, slots=16, lengths=Constant(5.0), trainer=TrainerSpeed(Constant(0.1)))
    item = average_forecast(rules, scenario)
    assert item.events >= ENOUGH_EVENTS
    assert item.runs == 1


def test_deaths_cost_attempts_and_tokens(tmp_path):
    (calm,) = run(tmp_path, "--nodes", "6")["forecasts"]
    (deadly,) = run(tmp_path, "--nodes", "6", "--life", "20")["forecasts"]
    assert deadly["dropped"]["node_lost"] > 0
    assert deadly["wasted"] > 0.01
    assert deadly["virtual_s"] > calm["virtual_s"]


def test_nodes_that_join_help_from_then_on(tmp_path):
    seconds = [
        run(tmp_path, "--nodes", "1", *options)["forecasts"][0]["virtual_s"]
        for options in ((), ("--join", "3@40"), ("--join", "3@0"))
    ]
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize("text", ["3", "3@", "@5", "0@5", "3@-1", "many@5"])
def test_a_join_that_cannot_be_read_is_refused(text):
    with pytest.raises(SystemExit):
        main(["quickstart", "--join", text])


@pytest.mark.parametrize("bound", [0, 4])
def test_whole_groups_yield_what_single_samples_do(tools, bound):
    """The short cut: a group's samples end together and take their average of rows until then."""
    rules = tools.rules(steps=80, groups_per_step=16, group_size=8, max_staleness=bound, lease_timeout=1e5)
    scenario = Scenario(
        nodes=3, slots=32, lengths=Lognormal(200, 0.4), speed=Speed(0.01, 0.0005), push_s=Constant(0.1),
        trainer=TrainerSpeed(Constant(3.0)),
    )  # fmt: skip
    each, whole = forecast(rules, scenario), forecast(rules, scenario._replace(whole_groups=True))
    assert whole.events < each.events / 2
    assert whole.steps_per_s == pytest.approx(each.steps_per_s, rel=0.1)
    assert whole.staleness_mean == pytest.approx(each.staleness_mean, rel=0.1)
    assert each.nodes_idle == pytest.approx(whole.nodes_idle, abs=0.1)

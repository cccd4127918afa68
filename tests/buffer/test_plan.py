"""`async-rl plan`: the knee, the best split, and what limits what."""

from __future__ import annotations

import builtins
import json

import pytest

from buffer.plan import best_split, knee, main
from buffer.scenario import Constant

GIVEN = ("--tokens-per-second", "2000", "--lengths", "300,0.3", "--train-seconds", "4", "--steps", "15",
         "--set", "buffer.groups_per_step=4", "--set", "inference.max_new_tokens=1000", "--set",
         "inference.max_context=1100", "--set", "run.eval_every=0", "--set", "inference.slots=16")  # fmt: skip
ATTEMPT_TOKENS = 32 * 300  # about, of a step: 4 groups of 8


def plan(tmp_path, *options):
    path = tmp_path / "plan.json"
    assert main(["quickstart", *GIVEN, *options, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_the_knee_is_the_fewest_nodes_that_feed_the_trainer(tmp_path, capsys):
    """A node samples 2,000 tokens a second, a step of about 10,000 takes four seconds to train."""
    written = plan(tmp_path, "--nodes", "4")
    points = written["points"]
    assert [point["nodes"] for point in points] == [1, 2, 3, 4]
    assert [point["limited_by"] for point in points] == ["nodes", "trainer", "trainer", "trainer"]
    assert all(point["steps_per_s"] <= min(point["nodes_limit"], point["trainer_limit"]) * 1.05 for point in points)
    assert points[0]["nodes_limit"] == pytest.approx(2000 / ATTEMPT_TOKENS, rel=0.2)
    assert points[3]["trainer_limit"] == pytest.approx(1 / 4, rel=0.01)
    assert points[3]["steps_per_s"] == pytest.approx(1 / 4, rel=0.05)
    assert written["chosen"]["nodes"] == 2
    assert points[3]["nodes_idle"] > points[1]["nodes_idle"]
    assert "knee" in capsys.readouterr().out


def test_machines_are_split_between_the_pools_and_the_assumption_is_said(tmp_path, capsys):
    written = plan(tmp_path, "--machines", "6")
    points = {(point["nodes"], point["workers"]): point["steps_per_s"] for point in written["points"]}
    assert set(points) == {(nodes, 6 - nodes) for nodes in range(1, 6)}
    chosen = (written["chosen"]["nodes"], written["chosen"]["workers"])
    assert points[chosen] == max(points.values())
    assert chosen[1] > 1
    assert f"if {chosen[1]} workers do train {chosen[1]} times as fast as one" in capsys.readouterr().out


def test_a_plot_is_drawn_and_without_matplotlib_the_message_says_so(tmp_path, monkeypatch, capsys):
    plot = tmp_path / "plan.png"
    plan(tmp_path, "--nodes", "2", "--plot", str(plot))
    assert plot.read_bytes()[:4] == b"\x89PNG"

    def without_matplotlib(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest)

    real_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert main(["quickstart", *GIVEN, "--nodes", "1", "--plot", str(plot)]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_run_that_cannot_go_on_is_an_error_that_says_why(capsys):
    options = ("--set", "run.draw_timeout=1", "--set", "buffer.lease_timeout=1")
    assert main(["quickstart", *GIVEN, *options, "--nodes", "1"]) == 1
    assert "1 nodes, 1 trainer workers: the simulated run ended: stuck after 0 steps" in capsys.readouterr().err


def test_the_knee_allows_five_percent_and_the_best_split_prefers_fresh_data():
    class Of:
        def __init__(self, nodes: int, steps_per_s: float, staleness_mean: float = 0.0) -> None:
            self.nodes = nodes
            self.forecast = self
            self.steps_per_s = steps_per_s
            self.staleness_mean = staleness_mean

    points = [Of(1, 0.5), Of(2, 0.94), Of(3, 0.96), Of(4, 1.0, 3.0), Of(5, 1.0, 2.0)]
    assert knee(points).nodes == 3
    assert best_split(points).nodes == 5
    assert Constant(1.0).mean == 1.0

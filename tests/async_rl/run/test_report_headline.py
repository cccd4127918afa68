from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import finish_run, make_directory, make_run

from async_rl.run.report.headline import Tile, are_rates, eval_interval, tiles, what_limited, wilson
from async_rl.run.report.run_data import RunData, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    directory = make_directory(tmp_path_factory.mktemp("headline") / "run")
    make_run(directory)
    finish_run(directory)
    return read_run(directory)


def tile(run: RunData, label: str) -> Tile:
    (found,) = (tile for tile in tiles(run) if tile.label == label)
    return found


def idle(run: RunData, inference: float | None, trainer: float | None, bound: int = 4) -> RunData:
    config = {**run.config, "buffer": {**run.config["buffer"], "max_staleness": bound}}
    shares = {"inference": inference, "trainer": trainer}
    return replace(run, config=config, summary={**run.summary, "idle_fraction": shares})


def test_the_interval_of_a_rate_is_wilsons() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_an_interval_holds_the_rate_and_lies_in_0_to_1(share: float, n: int) -> None:
    low, high = wilson(share, n)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1


def test_rewards_outside_0_to_1_have_no_interval(run: RunData) -> None:
    assert are_rates(run)
    beyond = replace(run, samples=[{"reward": 1.5}])
    assert not are_rates(beyond)
    assert eval_interval({"reward": 0.5, "n": 10}, rates=False) is None
    assert "95 %" in tile(run, "Evaluation").note
    assert "95 %" not in tile(beyond, "Evaluation").note


def test_the_slower_pool_is_the_one_that_the_other_waited_for(run: RunData) -> None:
    assert what_limited(idle(run, 0.63, 0.02)).pool == "trainer"
    assert what_limited(idle(run, 0.05, 0.41)).pool == "inference"
    assert "63%" in what_limited(idle(run, 0.63, 0.02)).figures


def test_without_a_slower_pool_none_is_named(run: RunData) -> None:
    assert what_limited(idle(run, 0.04, 0.09)).verdict == "The pools were balanced"
    assert "took turns" in what_limited(idle(run, 0.5, 0.45, bound=0)).verdict
    assert "both waited" in what_limited(idle(run, 0.5, 0.45)).verdict
    assert "not recorded" in what_limited(idle(run, None, 0.45)).verdict
    assert "Nothing was trained" in what_limited(replace(run, steps=[])).verdict


def test_what_must_not_be_is_marked(run: RunData) -> None:
    assert tile(run, "Ledger") == Tile("Ledger", "balances", "768 issued, 640 trained, 0 dropped")
    assert tile(replace(run, summary={**run.summary, "ledger_balances": False}), "Ledger").mark == "bad"
    assert tile(run, "Staleness").mark == ""
    too_old = {**run.summary, "staleness": {"max": 5, "mean": 1.0}}
    assert tile(replace(run, summary=too_old), "Staleness").mark == "bad"


def test_what_stale_data_cost_is_told_with_what_it_did_to_the_lengths(run: RunData) -> None:
    bias = {"ks": 0.12, "interval": [0.05, 0.19], "mean_tokens": {"sampled": 40.0, "trained": 31.5}}
    found = tile(replace(run, summary={**run.summary, "waste": 0.25, "length_bias": bias}), "Waste")
    assert found.value == "25.0% of sampled tokens"
    assert found.note == "31.5 tokens trained of a mean answer of 40; length bias 12.0% (95 %: 5.0% or more)"
    again = replace(run, summary={**run.summary, "reused": {"trained": 1200, "short_batches": 1}})
    assert tile(again, "Ledger").note.endswith("; 1,200 trained again")


def test_there_are_figures_before_there_is_anything(tmp_path: Path) -> None:
    empty = read_run(make_directory(tmp_path / "run"))
    assert tile(empty, "Sampled reward").value == "– → –"
    assert tile(empty, "Ledger").note == "not recorded yet"
    assert len(tiles(empty)) == 10
    assert tile(empty, "Served against trained") == Tile("Served against trained", "–", "not measured")


def test_a_node_that_began_beyond_its_bound_marks_the_tile_of_parity(run: RunData) -> None:
    near = {"engine": "torch", "bound": 1e-3, "canary": 2e-6, "first": 1e-6, "first_version": 0, "last": 2e-6}
    good = tile(replace(run, summary={**run.summary, "parity": {"a": near, "b": near}}), "Served against trained")
    assert (good.value, good.mark) == ("2.0e-06 nats", "")
    assert good.note == "largest |Δ log p| when a node began, of 2; bound 0.001"
    far = {**near, "bound": 0.4, "canary": 0.5}
    bad = tile(replace(run, summary={**run.summary, "parity": {"a": near, "b": far}}), "Served against trained")
    assert (bad.value, bad.mark) == ("5.0e-01 nats", "bad")

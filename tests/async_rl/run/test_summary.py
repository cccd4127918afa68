from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import BufferConfig, Config
from async_rl.run.summary import build_summary, ledger_balances, nested_ledger, percentile
from async_rl.version import PolicyId
from async_rl.wire.messages import NodeStatus, Status

CONFIG = Config(buffer=BufferConfig(max_staleness=4))
LEDGER = {"issued": 20, "leased": 0, "ready": 0, "batched": 0, "trained": 15, "stale": 2, "cancelled": 3}


def node(name: str, slots: int, busy: float, tokens: int) -> NodeStatus:
    return NodeStatus(name, "ready", "torch", slots, PolicyId("main", 2, "ab" * 32), 0, busy, tokens)


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "uptime_s": 10.0,
        "nodes": (node("a", 1, 1.0, 300), node("b", 3, 0.5, 500)),
        "trainer": "trainer",
        "newest": None,
        "confirmed_batches": 2,
        "steps": 2,
        "ledger": LEDGER,
        "eval_ledger": {"issued": 4, "evaluated": 4},
        "outside": {},
        "ready_groups": 0,
        "ready_bytes": 0,
        "reserved_bytes": 0,
        "waiting": "",
        "push_ms": (30.0, 10.0, 20.0),
        "bound": 4,
    }
    return Status(**{**values, **changes})


def step(index: int, reward: float, **changes: Any) -> dict[str, Any]:
    values = {"staleness_max": 1, "staleness_mean": 1.0, "tokens": 100, "draw_wait_s": 1.0, "step_s": 4.0}
    return {"step": index, "version": index + 1, "reward": reward, **values, **changes}


def test_rewards_are_the_means_of_the_first_and_last_15_steps() -> None:
    summary = build_summary([step(index, float(index)) for index in range(40)], status(), CONFIG, 10.0)
    assert summary["reward"] == {"first": 7.0, "last": 32.0}
    assert summary["steps"] == 40


def test_what_stale_data_cost_is_counted_in_tokens_and_in_lengths() -> None:
    steps = [step(0, 0.0, trained_lengths={"10": 60}), step(1, 0.0, trained_lengths={"10": 20, "20": 20}), step(2, 0.0)]
    counted = status(sampled_lengths={10: 80, 20: 120}, handovers={"handed_over": 3, "mixed": 1})
    summary = build_summary(steps, counted, CONFIG, 10.0)
    assert summary["waste"] == 1 - (80 * 10 + 20 * 20) / (80 * 10 + 120 * 20)
    assert summary["length_bias"]["ks"] == 0.4
    assert summary["length_bias"]["interval"][0] > 0.1
    assert summary["length_bias"]["mean_tokens"] == {"sampled": 16.0, "trained": 12.0}
    assert summary["handovers"] == {"handed_over": 3, "mixed": 1}
    assert build_summary(steps, None, CONFIG, 10.0)["length_bias"] is None


def test_staleness_is_the_highest_and_the_mean_over_tokens_against_the_bound() -> None:
    steps = [
        step(0, 0.0, tokens=300, staleness_mean=0.0, staleness_max=0),
        step(1, 0.0, staleness_mean=2.0, staleness_max=3),
    ]
    assert build_summary(steps, status(), CONFIG, 10.0)["staleness"] == {"max": 3, "mean": 0.5, "bound": 4}


def look(time_s: float, **tokens: int) -> dict[str, Any]:
    nodes = [{"name": name, "sampled_tokens": count} for name, count in tokens.items()]
    return {"time_s": time_s, "pools": {"nodes": nodes}}


def test_the_rollout_rate_counts_nodes_that_left_and_nodes_that_began_anew() -> None:
    looks = [look(0.0, a=50), look(1.0, a=100, b=30), look(2.0, b=50), look(4.0, a=20, b=50)]
    # a: 50, then 20 after it came back with a fresh count; b: 30 and 20.
    assert build_summary(looks, status(), CONFIG, 10.0)["tokens_per_second"]["rollout"] == (50 + 20 + 30 + 20) / 4


def test_rates_are_over_the_wall_clock_and_idleness_is_weighted_by_slots() -> None:
    records = [look(2.0, a=100, b=0), step(0, 0.0), step(1, 0.0), look(7.0, a=300, b=200)]
    summary = build_summary(records, status(), CONFIG, 10.0, {"push_bytes": 42})
    assert summary["tokens_per_second"] == {"rollout": 80.0, "train": 20.0}
    assert summary["idle_fraction"] == {"inference": pytest.approx(1 - 2.5 / 4), "trainer": 0.25}
    assert summary["push_ms"] == {"p50": 20.0, "p99": 30.0}
    assert summary["push_bytes"] == 42


def test_evaluations_are_the_first_and_the_last() -> None:
    records = [
        step(0, 0.0, eval={"version": 0, "reward": 0.3, "n": 8}),
        {"eval": {"version": 2, "reward": 0.8, "n": 7}},
    ]
    summary = build_summary(records, status(), CONFIG, 1.0)
    only = {"first": 0.3, "last": 0.8, "last_version": 2, "n": 7, "reward": 0.8}
    assert summary["eval"] == {"first": 0.3, "last": 0.8, "last_version": 2, "samples": 7, "sets": {"eval": only}}


def test_the_ledger_has_its_reasons_for_dropping_apart_and_says_whether_it_balances() -> None:
    summary = build_summary([], status(), CONFIG, 1.0)
    assert summary["ledger"]["dropped"] == {"stale": 2, "cancelled": 3}
    assert summary["ledger_balances"] is True
    broken = build_summary([], status(ledger={**LEDGER, "trained": 14}), CONFIG, 1.0)
    assert broken["ledger_balances"] is False


def test_a_run_without_steps_or_status_has_a_summary_that_says_so() -> None:
    summary = build_summary([], None, CONFIG, 1.0)
    assert summary["reward"] == {"first": None, "last": None}
    assert summary["ledger"] is None
    assert summary["tokens_per_second"]["rollout"] is None


@given(
    st.dictionaries(st.sampled_from(["leased", "ready", "batched", "trained", "stale", "refused"]), st.integers(0, 99))
)
def test_a_ledger_whose_issued_is_the_sum_balances_and_no_other(counts: dict[str, int]) -> None:
    issued = sum(counts.values())
    assert ledger_balances(nested_ledger({"issued": issued, **counts}))
    assert not ledger_balances(nested_ledger({"issued": issued + 1, **counts}))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_one_of_the_values_with_enough_at_or_below_it(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9

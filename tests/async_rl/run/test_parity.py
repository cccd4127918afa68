"""What a run says of how far its nodes were from its trainer."""

from __future__ import annotations

from typing import Any

from async_rl.run.parity import parity_of, parity_text
from async_rl.run.status import NodeState, RunState
from async_rl.run.status_text import state_text


def look(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"time_s": 1.0, "pools": {"nodes": list(nodes)}}


def node(name: str, engine: str = "torch", first_version: int = 0, **numbers: float | None) -> dict[str, Any]:
    values = {"bound": 1e-3, "canary": 2e-6, "first": 1e-6, "max_dlogp": 3e-6, **numbers}
    return {"name": name, "engine": engine, "first_version": first_version, **values}


def test_the_last_look_at_each_node_counts_also_of_one_that_is_gone() -> None:
    unmeasured = node("c", max_dlogp=None)
    records = [look(node("a"), unmeasured), {"reward": 1.0}, look(node("b", max_dlogp=5e-6))]
    parity = parity_of(records)
    assert parity is not None
    assert sorted(parity) == ["a", "b"]
    assert parity["b"] == {
        "engine": "torch", "bound": 1e-3, "canary": 2e-6, "first": 1e-6, "first_version": 0, "last": 5e-6
    }  # fmt: skip


def test_nothing_measured_is_nothing_said() -> None:
    assert parity_of([look(node("a", max_dlogp=None)), {"reward": 1.0}]) is None
    assert parity_text(None) is None


def test_the_text_has_the_worst_of_each_engine_and_calls_version_0_the_base() -> None:
    records = [look(node("a"), node("b", canary=4e-6), node("c", "vllm", bound=0.4, first=0.02, first_version=3))]
    assert parity_text(parity_of(records)) == (
        "torch canary 4.0e-06, base 1.0e-06, last 3.0e-06 (bound 0.001); "
        "vllm canary 2.0e-06, first policy 2.0e-02, last 3.0e-06 (bound 0.4)"
    )


def test_the_status_of_a_run_that_goes_on_says_it_of_the_nodes_that_were_measured() -> None:
    measured = NodeState(
        name="a", state="ready", engine="torch", policy="0-ab", behind=0, leased=0, slots=8, busy=0.5,
        tokens_per_second=1.0, mismatch=3e-6, bound=1e-3, canary=2e-6, first=1e-6, first_version=0,
    )  # fmt: skip
    joining = NodeState(
        name="b", state="syncing", engine="vllm", policy=None, behind=None, leased=0, slots=8, busy=0.0,
        tokens_per_second=0.0,
    )  # fmt: skip
    state = RunState(phase="running", run="r", steps=3, confirmed=0, nodes=[measured, joining])
    (line,) = [line for line in state_text(state).splitlines() if line.startswith("parity")]
    assert line == (
        "parity    torch canary 2.0e-06, base 1.0e-06, last 3.0e-06 (bound 0.001): largest |Δ log p| from the trainer"
    )

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import STEP_S, TOKENS, WAIT_S, node_view, pools_record, step_record

from async_rl.run.report.timeline import (
    PHASES,
    Span,
    node_spans,
    pool_idle,
    spread,
    step_parts,
    timeline,
    trainer_idle,
    trainer_phases,
)

moments = st.floats(0, 100)
spans = st.tuples(moments, st.floats(0.01, 50), st.floats(0, 1000)).map(lambda s: Span(s[0], s[0] + s[1], s[2]))


@given(st.lists(spans, max_size=20), st.integers(1, 50))
def test_spreading_loses_and_makes_nothing(found: list[Span], bins: int) -> None:
    amounts = spread(found, np.linspace(0, 150, bins + 1))
    assert amounts.min() >= -1e-9
    assert amounts.sum() == pytest.approx(sum(span.amount for span in found), abs=1e-6)


def test_an_amount_lies_in_the_bins_its_span_covers() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    assert spread([Span(0.5, 2.5, 8.0)], edges).tolist() == [2.0, 4.0, 2.0]
    assert spread([], edges).tolist() == [0.0, 0.0, 0.0]


def test_the_phases_of_a_step_fill_it_in_their_order() -> None:
    phases = trainer_phases([step_record(3)])
    (waiting,), (training,), (publishing,), (other,) = (phases[name] for name in PHASES)
    assert waiting == Span(3.0, 3.0 + WAIT_S, WAIT_S)
    assert (training.start, publishing.start, other.start) == (waiting.end, training.end, publishing.end)
    assert other.end == pytest.approx(3.0 + STEP_S)


def test_a_record_without_the_newer_parts_of_a_step_still_fills_it() -> None:
    step = step_record(0)
    del step["cycle_s"]
    assert sum(step_parts(step).values()) == pytest.approx(STEP_S)
    assert sum(step_parts({"step": 0}).values()) == 0


def test_both_pools_idle_for_as_long_as_was_recorded() -> None:
    line = timeline([step_record(step) for step in range(10)], [pools_record(second) for second in range(11)], 10.0)
    assert pool_idle(line) == pytest.approx([0.25] * 10)
    assert trainer_idle(line) == pytest.approx([WAIT_S] * 10)
    assert line.trained.tolist() == pytest.approx([TOKENS] * 10)
    assert line.nodes["node-1"].tokens.sum() == 2000


def test_where_nothing_is_known_of_a_pool_no_share_is_made_up() -> None:
    line = timeline([step_record(step) for step in range(5)], [], 10.0)
    assert pool_idle(line) == [None] * 10
    assert trainer_idle(line)[5:] == [None] * 5


def test_counters_that_begin_anew_are_those_of_a_node_that_came_back() -> None:
    first = [node_view("node-0", 4.0), node_view("node-1", 4.0)]
    back = [node_view("node-0", 1.0), node_view("node-1", 6.0)]
    found = node_spans([pools_record(4, nodes=first), pools_record(6, nodes=back)])
    assert found["node-0"].alive == [Span(0.0, 4.0, 4.0), Span(5.0, 6.0, 1.0)]
    assert found["node-1"].alive == [Span(0.0, 4.0, 4.0), Span(4.0, 6.0, 2.0)]
    assert [span.amount for span in found["node-0"].tokens] == [800, 200]


def test_a_node_that_came_back_and_has_lived_for_longer_is_known_by_its_other_counters() -> None:
    first, back = [node_view("node-0", 2.0)], [node_view("node-0", 5.0, sampled_tokens=100)]
    tokens = node_spans([pools_record(2, nodes=first), pools_record(9, nodes=back)])["node-0"].tokens
    assert tokens == [Span(0.0, 2.0, 400), Span(4.0, 9.0, 100)]


def test_a_node_that_was_not_heard_of_did_nothing_in_that_time_until_it_is() -> None:
    silent = [pools_record(second, nodes=[node_view("node-0", alive)]) for second, alive in ((1, 1), (2, 1), (3, 3))]
    assert node_spans(silent)["node-0"].alive == [Span(0.0, 1.0, 1.0), Span(1.0, 3.0, 2.0)]


def test_another_buffer_counts_from_nothing_and_not_before_it_began() -> None:
    before = pools_record(10)
    after = [pools_record(10 + more, uptime_s=more, nodes=[node_view("node-0", 11.0 + more)]) for more in (1, 2)]
    alive = node_spans([before, *after])["node-0"].alive
    assert [span for span in alive if span.amount] == [Span(0.0, 10.0, 10.0), Span(11.0, 12.0, 1.0)]


def test_no_more_work_is_counted_than_there_was_time() -> None:
    """A node that lived before the run's clock began."""
    early = pools_record(1, nodes=[node_view("node-0", 30.0)])
    spans = node_spans([early])["node-0"]
    assert spans.alive == [Span(0.0, 1.0, 1.0)]
    assert spans.busy[0].amount <= 1.0


@pytest.mark.parametrize(("seconds", "unit", "end"), [(30, "seconds", 30), (1200, "minutes", 20), (36000, "hours", 10)])
def test_time_is_in_the_unit_that_people_would_use(seconds: float, unit: str, end: float) -> None:
    line = timeline([], [], seconds)
    assert (line.unit, line.end) == (unit, end)
    assert len(line.middles) <= 120

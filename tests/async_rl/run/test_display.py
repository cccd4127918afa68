from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from async_rl.run.display import (
    BARS,
    LiveDisplay,
    PlainDisplay,
    Snapshot,
    duration,
    ledger_text,
    live_panel,
    make_display,
    plain_line,
    seconds_left,
    sparkline,
    train_rate,
)
from async_rl.version import PolicyId
from async_rl.wire.messages import NodeStatus, Status

LEDGER = {"issued": 1234, "leased": 30, "ready": 4, "batched": 0, "trained": 1190, "stale": 10}
STATUS = Status(
    uptime_s=65.0,
    nodes=(
        NodeStatus("node-0", "ready", "torch", 128, PolicyId("main", 11, "ab12cd34" * 8), 96, 0.93, 4000),
        NodeStatus("node-1", "syncing", "torch", 128, None, 0, 0.0, 0),
    ),
    trainer="ready",
    newest=PolicyId("main", 12, "ef" * 32),
    confirmed_batches=12,
    steps=120,
    ledger=LEDGER,
    eval_ledger={"issued": 512, "evaluated": 512},
    outside={"unknown": 0},
    ready_groups=4,
    ready_bytes=4096,
    reserved_bytes=8192,
    waiting="trainer waits for 28 groups of batch 12",
    push_ms=(12.0,),
    bound=4,
)


def step(index: int, **changes: Any) -> dict[str, Any]:
    values = {"reward": 0.25, "staleness_max": 3, "staleness_mean": 1.5, "tokens": 1000, "step_s": 0.5}
    return {"step": index, "version": index + 1, **values, **changes}


def snapshot(steps: int = 12, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "steps": [step(index) for index in range(steps)],
        "evals": [{"version": 0, "reward": 0.3, "n": 512}, {"version": 10, "reward": 0.5, "n": 512}],
        "status": STATUS,
        "rollout_rate": 3456.7,
    }
    return Snapshot("quickstart", 120, 4, 65.0, **{**values, **changes})


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_sparkline_rises_with_its_values_and_keeps_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert len(sparkline(list(range(1000)), width=20)) == 20
    assert sparkline([0.5, 0.5]) == "▅▅"
    assert sparkline([]) == ""


def test_durations_read_as_people_write_them() -> None:
    assert [duration(seconds) for seconds in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_the_time_left_is_the_pace_of_the_last_steps_times_what_is_left() -> None:
    assert seconds_left(snapshot()) == (120 - 12) * 0.5
    assert seconds_left(snapshot(steps=0)) is None


def test_the_training_rate_counts_the_waiting() -> None:
    assert train_rate([step(0, step_s=4.0), step(1, step_s=1.0)]) == 400.0


def test_the_ledger_reads_as_its_identity() -> None:
    assert ledger_text(LEDGER) == (
        "1,234 issued = 30 leased + 4 ready + 0 batched + 1,190 trained + 10 dropped (10 stale)"
    )


def test_a_plain_line_says_everything_that_matters() -> None:
    assert plain_line(snapshot()) == (
        "step 12/120 | reward 0.250 | eval 0.500 at version 10 | staleness max 3, mean 1.50  (bound 4) | "
        "tokens/s rollout 3,457, train 2,000 | nodes at version 11, – | left 0:54"
    )


def test_before_the_first_step_a_plain_line_says_who_waits() -> None:
    assert plain_line(snapshot(steps=0, evals=[])).endswith("trainer waits for 28 groups of batch 12")


def test_the_panel_shows_every_subject() -> None:
    text = shown(live_panel(snapshot()))
    expected = ["12/120", "0:54 left", "0.250", "0.300 → 0.500", "max 3, mean 1.50", "rollout 3,457, train 2,000"]
    expected += ["policy 11-ab12cd34", "no policy yet", "1,234 issued", "trainer waits for 28 groups"]
    assert [words for words in expected if words not in text] == []


def test_the_panel_is_there_before_anything_is_known() -> None:
    assert "for the buffer to answer" in shown(live_panel(snapshot(steps=0, evals=[], status=None, rollout_rate=None)))


def test_plain_lines_come_for_what_is_new_and_not_more_often_than_every_few_seconds() -> None:
    now = 0.0
    console = Console(file=io.StringIO(), width=200)
    display = PlainDisplay(console, clock=lambda: now)

    def lines() -> int:
        return console.file.getvalue().count("\n")  # type: ignore[attr-defined]

    display.update(snapshot(steps=0, evals=[]))
    assert lines() == 0
    display.update(snapshot(steps=1, evals=[]))
    assert lines() == 1
    now = 1.0
    display.update(snapshot(steps=2, evals=[]))
    assert lines() == 1
    now = 6.0
    display.update(snapshot(steps=3, evals=[]))
    display.update(snapshot(steps=3, evals=[]))
    assert lines() == 2
    display.update(snapshot(steps=4))
    assert lines() == 3
    now = 40.0
    display.update(snapshot(steps=4))
    assert lines() == 4


def test_a_terminal_gets_the_panel_and_anything_else_plain_lines() -> None:
    terminal = make_display(Console(file=io.StringIO(), force_terminal=True, width=100))
    terminal.update(snapshot())
    terminal.close()
    assert isinstance(terminal, LiveDisplay)
    assert isinstance(make_display(Console(file=io.StringIO(), force_terminal=False)), PlainDisplay)

from __future__ import annotations

import math
from pathlib import Path

import pytest

from async_rl.run.metrics import (
    MetricsError,
    MetricsTail,
    MetricsWriter,
    eval_sets_of,
    evals_of,
    read_metrics,
    steps_of,
)


def test_what_is_written_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 0, "reward": 0.25})
        assert read_metrics(path) == [{"step": 0, "reward": 0.25}]


def test_numbers_without_a_json_word_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 0, "loss": math.nan, "nested": {"ess": math.inf}})
    assert read_metrics(path) == [{"step": 0, "loss": None, "nested": {"ess": None}}]


def test_a_torn_last_line_is_left_out_by_readers_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n{"step":1,"rew')
    assert read_metrics(path) == [{"step": 0}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
    assert path.read_text() == '{"step":0}\n{"step":1}\n'


def test_a_tail_gives_every_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step":0}\n{"st')
    assert tail.read() == [{"step": 0}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ep":1}\n')
    assert tail.read() == [{"step": 1}]


def test_a_broken_line_in_the_midst_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\nnonsense\n{"step":2}\n')
    with pytest.raises(MetricsError, match="line 2: not JSON"):
        read_metrics(path)


def test_a_resumed_writer_keeps_only_the_steps_before_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(4):
            writer.write({"step": step, "reward": 0.0})
    with MetricsWriter(path, keep_before_step=2) as writer:
        writer.write({"step": 2, "reward": 1.0})
    assert [(record["step"], record["reward"]) for record in read_metrics(path)] == [(0, 0.0), (1, 0.0), (2, 1.0)]


def test_evaluations_are_found_in_steps_and_in_lines_of_their_own_once_each() -> None:
    records = [
        {"step": 0, "reward": 0.1, "eval": {"version": 0, "reward": 0.3, "n": 8}},
        {
            "step": 1,
            "reward": 0.2,
            "eval": {"version": 2, "reward": 0.5, "n": 8},
            "evals": [{"version": 1, "reward": 0.4, "n": 8}, {"version": 2, "reward": 0.5, "n": 8}],
        },
        {"version": 3, "eval": {"version": 3, "reward": 0.6, "n": 8}},
    ]
    assert [(item["version"], item["reward"]) for item in evals_of(records)] == [(0, 0.3), (1, 0.4), (2, 0.5), (3, 0.6)]
    assert [step["step"] for step in steps_of(records)] == [0, 1]


def test_evaluations_are_kept_apart_by_set_and_the_first_one_is_that_of_the_whole() -> None:
    records = [{"eval": {"set": name, "version": version, "reward": version / 10}} for name, version in
               (("easy", 2), ("hard", 0), ("easy", 0), ("hard", 2))]  # fmt: skip
    sets = eval_sets_of(records)
    versions = {name: [item["version"] for item in items] for name, items in sets.items()}
    assert versions == {"easy": [0, 2], "hard": [0, 2]}
    assert evals_of(records) == sets["easy"]
    cancelled = [{"eval": {"set": "easy", "version": 0, "reward": None}}]
    assert evals_of(cancelled + records[1:]) == [records[2]["eval"]]
    assert list(eval_sets_of(cancelled + records[1:2])) == ["hard"]

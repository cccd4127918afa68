from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.config import Config, ModelConfig
from async_rl.run.closing import closing_words, resume_words, summary_text
from async_rl.run.directory import RunDirectory
from async_rl.run.summary import build_summary

CONFIG = Config(task={"kind": "digit_sort"}, model=ModelConfig(path="base"))
RECORDS = [
    {"step": 0, "version": 1, "reward": 0.25, "staleness_max": 0, "staleness_mean": 0.0, "tokens": 10, "step_s": 1.0},
    {"step": 1, "version": 2, "reward": 0.75, "staleness_max": 1, "staleness_mean": 1.0, "tokens": 10, "step_s": 1.0},
]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory.create(tmp_path / "run", CONFIG)
    yield made
    made.remove_sockets()


def test_the_end_names_what_was_made_and_nothing_that_was_not(directory: RunDirectory) -> None:
    directory.summary_path.touch()
    words = closing_words(directory, build_summary(RECORDS, None, CONFIG, 65.0))
    assert str(directory.summary_path) in words
    assert str(directory.curve_path) not in words
    assert f"async-rl export {directory.path} DIR" in words


def test_the_line_that_loads_the_adapter_names_the_model_it_was_made_for(directory: RunDirectory) -> None:
    final = directory.adapters / "final"
    final.mkdir()
    (final / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/base"}))
    words = closing_words(directory, build_summary(RECORDS, None, CONFIG, 65.0))
    model = "transformers.AutoModelForCausalLM.from_pretrained('/models/base')"
    assert f"peft.PeftModel.from_pretrained({model}, '{final}')" in words


def test_whole_weights_are_loaded_as_they_are_and_there_is_nothing_to_merge(directory: RunDirectory) -> None:
    final = directory.adapters / "final"
    final.mkdir()
    (final / "config.json").touch()
    words = closing_words(directory, build_summary(RECORDS, None, CONFIG, 65.0))
    assert f"transformers.AutoModelForCausalLM.from_pretrained('{final}')" in words
    assert f"model           {final}" in words
    assert "peft" not in words.lower()
    assert "--merged" not in words


def test_what_a_push_takes_stands_beside_what_it_would_in_other_forms() -> None:
    sizes = {"push_bytes": 1234, "push_bytes_full": 5678900, "push_bytes_adapter": 4321}
    text = summary_text(build_summary(RECORDS, None, CONFIG, 65.0, sizes))
    assert "1,234 bytes (whole weights 5,678,900, an adapter 4,321)" in text


def test_a_summary_reads_in_a_few_lines_also_when_the_buffer_said_nothing() -> None:
    lines = summary_text(build_summary(RECORDS, None, CONFIG, 65.0)).splitlines()
    assert "steps     2 in 1:05" in lines
    assert "staleness max 1, mean 0.50, bound 4" in lines
    assert "push      p50 – ms, p99 – ms" in lines


def test_an_interrupted_run_says_how_to_go_on_once_there_is_a_checkpoint(directory: RunDirectory) -> None:
    assert "--resume" not in resume_words(directory)
    (directory.checkpoints / "v00000004").mkdir()
    assert resume_words(directory).endswith(f"async-rl run {directory.config_path} --out {directory.path} --resume")

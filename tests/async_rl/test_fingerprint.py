from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config, config_from_table
from async_rl.errors import AsyncRLError
from async_rl.fingerprint import difference, fingerprint


def settings(**changes: dict[str, Any]) -> Config:
    table: dict[str, Any] = {"model": {"path": "somewhere"}, "task": {"kind": "digit_sort", "digits": 5}}
    for section, values in changes.items():
        table[section] = table.get(section, {}) | values
    return config_from_table(table, "test")


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    write_weights(folder / "model.safetensors", [0, 8], b"\x00" * 8)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write_weights(path: Path, offsets: list[int], data: bytes) -> None:
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_the_same_model_in_another_place_under_other_settings_of_the_machine_is_the_same(
    model: Path, tmp_path: Path
) -> None:
    reference = fingerprint(settings(), model)
    elsewhere = make_model(tmp_path / "copy")
    write_weights(elsewhere / "model.safetensors", [0, 8], b"\x01" * 8)  # of the weights only the header counts
    other = settings(
        run={"steps": 7},
        model={"path": "elsewhere", "device": "cpu", "dtype": "bfloat16"},
        inference={"slots": 3, "nodes": 9, "dtype": "float16"},
        trainer={"learning_rate": 1.0, "rank": 2},
        task={"path": "elsewhere"},
    )
    assert fingerprint(other, elsewhere) == reference
    assert difference(reference, fingerprint(other, elsewhere)) == ""


def test_where_the_data_lie_may_differ_and_how_they_are_cut_may_not(model: Path) -> None:
    def of(**source: Any) -> dict[str, str]:
        return fingerprint(settings(task={"source": [{"path": "a.jsonl", "eval_rows": 10, **source}]}), model)

    assert of(path="b.jsonl") == of()
    assert of(eval_path="c.jsonl") == of(eval_path="d.jsonl")
    assert of(eval_path="c.jsonl")["[task]"] != of()["[task]"]  # here the first ten rows are not trained on


FILES: dict[str, Callable[[Path], object]] = {
    "model config": lambda model: (model / "config.json").write_text("{}"),
    "weights": lambda model: write_weights(model / "model.safetensors", [8, 16], b"\x00" * 16),
    "tokenizer": lambda model: (model / "tokenizer_config.json").write_text("{}"),
    "chat template": lambda model: (model / "chat_template.jinja").unlink(),
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "[task]": {"task": {"digits": 6}},
    "[algorithm]": {"algorithm": {"ratio_high": 3.0}},
    "group size": {"buffer": {"group_size": 4}},
    "sampling": {"inference": {"temperature": 0.5}},
}


@pytest.mark.parametrize("part", [*FILES, *SETTINGS])
def test_a_difference_names_the_part_and_both_values_and_no_other(part: str, model: Path) -> None:
    ours = fingerprint(settings(), model)
    if part in FILES:
        FILES[part](model)
    theirs = fingerprint(settings(**SETTINGS.get(part, {})), model)
    assert difference(ours, theirs) == f"{part}: the trainer has {ours[part]}, it has {theirs[part]}"
    assert ours[part] != theirs[part]


def test_several_differences_are_all_named_and_a_missing_part_is_nothing() -> None:
    text = difference({"a": "1", "b": "2", "c": "3"}, {"a": "9", "b": "2", "d": "4"})
    assert text.split("; ") == [
        "a: the trainer has 1, it has 9",
        "c: the trainer has 3, it has nothing",
        "d: the trainer has nothing, it has 4",
    ]


def test_moving_a_byte_from_one_tokenizer_file_to_the_next_is_a_difference(model: Path) -> None:
    """Parts are hashed with their lengths, so their borders count."""
    (model / "tokenizer.json").write_text("ab")
    (model / "tokenizer_config.json").write_text("c")
    ours = fingerprint(settings(), model)
    (model / "tokenizer.json").write_text("a")
    (model / "tokenizer_config.json").write_text("bc")
    assert fingerprint(settings(), model)["tokenizer"] != ours["tokenizer"]


@pytest.mark.parametrize("missing", ["everything", "config.json", "model.safetensors"])
def test_a_missing_model_says_where_it_was_looked_for_and_what_is_wanted(model: Path, missing: str) -> None:
    path = model / "nowhere" if missing == "everything" else model
    (model / missing).unlink(missing_ok=True)
    with pytest.raises(AsyncRLError, match=r"Hugging Face layout") as caught:
        fingerprint(settings(), path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_weights_that_are_no_safetensors_file_are_named(model: Path, data: bytes) -> None:
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(AsyncRLError, match=r"model\.safetensors: not a safetensors file"):
        fingerprint(settings(), model)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_lm import save_qwen3

from inference.engine import EngineError
from inference.vllm_pieces import runs_between
from inference.vllm_settings import engine_arguments, read_config, read_rank

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    path = save_qwen3(folder / "model", **SIZES)
    options: dict[str, Any] = {
        "slots": 4, "max_context": 32, "adapters": 2, "device": "cpu", "dtype": "float32", "arguments": {}
    }  # fmt: skip
    return engine_arguments(path, read_config(path), **(options | changes))


def test_arguments_of_the_config_come_before_ours(tmp_path: Path) -> None:
    made = settings(tmp_path, arguments={"max_lora_rank": 8, "gpu_memory_utilization": 0.5})
    assert made["max_lora_rank"] == 8
    assert made["gpu_memory_utilization"] == 0.5


@pytest.mark.parametrize("name", ["model", "logprobs_mode", "additional_config", "enable_lora", "dtype"])
def test_an_argument_that_is_not_for_the_config_to_set_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineError, match=name):
        settings(tmp_path, arguments={name: "x"})


def test_without_adapters_lora_is_off(tmp_path: Path) -> None:
    assert "enable_lora" not in settings(tmp_path, adapters=0)


def test_a_sequence_as_long_as_the_context_can_be_scored_unless_the_model_ends_there(tmp_path: Path) -> None:
    assert settings(tmp_path)["max_model_len"] == 33
    assert settings(tmp_path, max_context=64)["max_model_len"] == 64


def test_the_kv_cache_on_a_cpu_has_room_for_every_request_at_its_longest(tmp_path: Path) -> None:
    made = settings(tmp_path, slots=4000)
    config = read_config(tmp_path / "model")
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert made["kv_cache_memory_bytes"] >= made["max_num_seqs"] * 128 * token
    assert "kv_cache_memory_bytes" not in settings(tmp_path, device="cuda")


def test_a_folder_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"adapter_config\.json"):
        read_rank(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 12}))
    assert read_rank(tmp_path) == 12


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 10, [("a", 4), ("b", 6)]),
        (0, 4, [("a", 4)]),
        (3, 5, [("a", 1), ("b", 1)]),
        (4, 8, [("b", 4)]),
        (10, 14, [("b", 2), ("c", 2)]),
        (2, 2, []),
    ],
)
def test_labels_are_cut_to_the_tokens_of_a_piece(begin: int, end: int, expected: list[tuple[str, int]]) -> None:
    assert runs_between([("a", 0), ("b", 4), ("c", 12)], begin, end) == expected

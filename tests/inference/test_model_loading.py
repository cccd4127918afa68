"""Models that the torch engine cannot run right are refused before anything starts."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, Gemma3TextConfig, Llama4TextConfig, Qwen3Config, Qwen3NextConfig

from inference.engine import EngineError
from inference.model_loading import layer_windows, load_model, pick_device
from inference.torch_engine import TorchEngine


def test_sliding_and_full_layers_are_told_apart():
    assert layer_windows(Qwen3Config(num_hidden_layers=2)) == {"full_attention": None}
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=16)
    assert layer_windows(config) == {"sliding_attention": 16, "full_attention": None}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
        (Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "not causal"),
    ],
)
def test_attention_that_is_not_plain_and_causal_is_refused_by_name(config, message):
    with pytest.raises(EngineError, match=message):
        layer_windows(config)


def test_a_missing_or_broken_model_folder_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"no model at .*nowhere"):
        load_model(tmp_path / "nowhere", pick_device("cpu"), "auto")
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="cannot be loaded"):
        load_model(tmp_path, pick_device("cpu"), "auto")
    with pytest.raises(EngineError, match="dtype 'int8'"):
        load_model(tmp_path, pick_device("cpu"), "int8")


def test_a_context_longer_than_the_models_positions_is_refused(qwen):
    with pytest.raises(EngineError, match=r"max_context is 65, but .* has 64 positions"):
        TorchEngine(qwen.path, slots=2, max_context=65, max_resident=2, device="cpu")


def test_describe_and_capabilities_tell_what_runs(qwen):
    engine = qwen.engine(slots=4, max_context=48)
    facts = engine.describe()
    assert facts["model_type"] == "qwen3"
    assert facts["dtype"] == "float32"
    assert facts["adapter_targets"] == 14
    # keys and values, 2 layers, 4 slots, 2 heads, 48 positions and a spare one, 8 dims, 4 bytes
    assert facts["kv_cache_bytes"] == 2 * 2 * 4 * 2 * 49 * 8 * 4
    assert (facts["forward"], facts["decode"]) == ("dense", "eager")
    assert engine.capabilities.in_flight == {"finish", "continue", "recompute"}
    assert engine.capabilities.resident_versions == 3

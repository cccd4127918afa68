"""The memory estimate of the Megatron backend: its counts against others, and what `--dry-run` prints of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from async_rl.config import CONFIGS, ConfigError, ModelConfig, TrainerConfig, load_config
from async_rl.parallel_config import ParallelConfig
from async_rl.run import checks
from async_rl.run.cli import main
from trainer import head, tiny_model
from trainer.megatron import memory
from trainer.megatron.layer_memory import Ranks
from trainer.megatron.layout import stage_layers
from trainer.megatron.memory import adapter_numbers, estimate, weight_numbers
from trainer.megatron.shape import TINY_VOCABULARY, ModelShape, read_shape, shape_in, shipped_shapes

BIG = ("qwen3-30b-a3b-megatron", "trillion-class")
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tensor=2, sequence=True),
    ParallelConfig(pipeline=2),
    ParallelConfig(data=4, expert=4),
    ParallelConfig(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True),
]


def shape(**changes: Any) -> ModelShape:
    return msgspec.convert({"model_type": "qwen3_moe", **SIZES, **MIXTURE, **changes}, ModelShape)


def lora(parallel: ParallelConfig = LAYOUTS[0], **changes: Any) -> TrainerConfig:
    return TrainerConfig(backend="megatron", parallel=parallel, **changes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
def test_a_shape_has_as_many_parameters_as_the_model(kind: type[Any], tied: bool, tmp_path: Path) -> None:
    config = kind(**SIZES, tie_word_embeddings=tied, **(MIXTURE if kind is Qwen3MoeConfig else {}))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = shape_in(tmp_path / "config.json")
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert weight_numbers(found, range(4), ParallelConfig()) == found.parameters


def test_the_shipped_shapes_are_as_large_as_their_names_say() -> None:
    parameters = {name: shape_in(file).parameters / 1e9 for name, file in shipped_shapes().items()}
    assert parameters["qwen3-30b-a3b"] == pytest.approx(30.5, abs=0.1)  # as its model card has it
    assert parameters["trillion-class"] == pytest.approx(1093, abs=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_hold_every_weight_and_what_is_replicated_as_often_as_they_are(layout: ParallelConfig) -> None:
    model = shape()
    stages = [stage_layers(4, layout.pipeline, stage) for stage in range(layout.pipeline)]
    held = sum(weight_numbers(model, layers, layout) for layers in stages) * layout.tensor * layout.data
    width, ranks = 32, layout.tensor * layout.data
    experts = 3 * 8 * 3 * width * 24  # three layers, each over all ranks of a stage
    small = 4 * (2 * width + 2 * 16) + width + 3 * 8 * width  # norms and routers, whole on each
    copies = ranks // (layout.expert * layout.expert_tensor)
    assert held == experts * copies + small * ranks + (model.parameters - experts - small) * layout.data


def test_an_adapter_has_as_many_numbers_as_its_matrices_have() -> None:
    ranks, model = Ranks(*[3] * 7), shape()
    attention = 3 * ((32 + 64) + 2 * (32 + 32) + (64 + 32))
    assert adapter_numbers(model, ranks, 0, ParallelConfig(), shared_outer=False) == attention + 3 * 3 * (32 + 64)
    each = attention + 3 * 3 * 8 * (32 + 24)
    assert adapter_numbers(model, ranks, 1, ParallelConfig(), shared_outer=False) == each
    outer = attention + 3 * 3 * (32 + 8 * 24)
    assert adapter_numbers(model, ranks, 1, ParallelConfig(), shared_outer=True) == outer
    some = memory.adapter_ranks(lora(rank=3, targets=("q_proj", "down_proj")))
    assert some == Ranks(3, 0, 0, 0, 0, 0, 3)


def test_more_ranks_or_recomputation_need_less_of_each() -> None:
    model = shape()
    alone = estimate(model, lora(), "bfloat16").largest
    for layout in LAYOUTS[1:]:
        assert estimate(model, lora(layout), "bfloat16").largest.weights < alone.weights
    again = estimate(model, lora(activation_checkpointing=True), "bfloat16").largest
    assert again.activations < alone.activations / 3


def test_a_stage_has_a_micro_batch_for_each_stage_from_it_to_the_last() -> None:
    stages = estimate(shape(), lora(ParallelConfig(pipeline=4)), "float32").stages
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    assert stages[1].activations > 1.4 * stages[2].activations


def test_a_sequence_longer_than_the_budget_is_what_is_counted() -> None:
    short, even, long = (
        estimate(shape(), lora(micro_batch_tokens=512), "float32", longest=longest).largest
        for longest in (0, 512, 4096)
    )
    assert short == even
    assert long == estimate(shape(), lora(micro_batch_tokens=4096), "float32").largest


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        (lora(targets=("q_proj", "qkv")), "'qkv' matches nothing .* q_proj, k_proj"),
        (lora(targets=("lm_head",)), "'lm_head' matches nothing"),
        (lora(ParallelConfig(pipeline=2), targets=("layers.0.self_attn.q_proj",)), "layers 2 to 3, pipeline stage 1"),
    ],
)
def test_targets_that_match_nothing_are_refused(trainer: TrainerConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        estimate(shape(), trainer, "float32")


def test_characters_of_the_made_model_are_counted() -> None:
    assert len(tiny_model.SPECIAL) + len(tiny_model.CHARACTERS) == TINY_VOCABULARY


def test_chunks_of_logits_are_those_of_the_head() -> None:
    assert memory.CHUNK_BYTES == head.CHUNK_BYTES


# --- where the shape comes from --------------------------------------------------------------------------------------


def test_a_models_own_config_goes_before_a_shipped_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    found, file = read_shape(ModelConfig(path=str(tmp_path), shape="trillion-class"))
    assert (found.num_hidden_layers, file.parent) == (4, tmp_path)
    found, file = read_shape(ModelConfig(path="/nowhere", shape="trillion-class"))
    assert (found.num_hidden_layers, file.parent) == (64, CONFIGS / "shapes")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ModelConfig(path="/nowhere"), "'/nowhere' has no config.json.*shape = 'qwen3-30b-a3b' or 'trillion-class'"),
        (ModelConfig(path="/nowhere", shape="qwen4"), "qwen4.json: cannot be read: No such file.*trillion-class"),
        (ModelConfig(path="llama"), "model_type = 'llama'.*qwen3 and qwen3_moe"),
        (ModelConfig(path="broken"), "not a config.json of Qwen3.*missing required field"),
    ],
)
def test_what_has_no_shape_is_refused(
    model: ModelConfig, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"llama": json.dumps({"model_type": "llama", **SIZES}), "broken": "{}"}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_shape(model)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (ParallelConfig(tensor=4, sequence=True), "tensor = 4 does not divide the model's 2 key and value heads"),
        (ParallelConfig(tensor=2), "tensor = 2 of a mixture of experts needs sequence = true"),
        (ParallelConfig(data=5, expert_tensor=5), "expert_tensor = 5 does not divide an expert's 24 columns"),
        (ParallelConfig(pipeline=5), "pipeline = 5 stages, but the model has 4 layers"),
        (ParallelConfig(data=3, expert=3), "expert = 3 does not divide the model's 8 experts"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout: ParallelConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        estimate(shape(), lora(layout), "float32")


# --- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BIG)
def test_a_dry_run_prints_the_estimate_where_neither_model_nor_data_nor_engine_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", name, "--dry-run"]) == 1
    said = capfd.readouterr()
    assert "data/gsm8k" in said.err
    config = load_config(name)
    replays = config.algorithm.router_replay != "none"
    longest = config.inference.max_context
    shape = read_shape(config.model)[0]
    found = estimate(shape, config.trainer, config.model.dtype, longest=longest, replays=replays)
    rows = {tuple(line.split()[-6:]) for line in said.out.splitlines()}
    for stage in found.stages:
        parts = (stage.weights, stage.adapters, stage.learning, stage.activations, stage.at_work, stage.total)
        assert tuple(f"{part / 1e9:.2f}" for part in parts) in rows
    assert f"{found.adapter_parameters:,} numbers" in said.out
    assert f"{config.trainer.parallel.ranks} ranks" in said.out


def test_a_dry_run_says_when_the_layout_does_not_fit_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "trillion-class", "--dry-run", "--set", "trainer.parallel.expert=7"]) == 1
    assert "[trainer.parallel]" in capfd.readouterr().err


@pytest.mark.parametrize(("change", "code"), [((), 0), (("--set", "trainer.parallel.pipeline=3"), 1)])
def test_a_dry_run_knows_a_model_that_is_yet_to_be_made(
    change: tuple[str, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(checks, "BACKENDS", {})
    assert main(["run", "quickstart-moe", "--dry-run", *change]) == code
    said = capfd.readouterr()
    assert "[model.tiny]" in said.out if code == 0 else "[trainer.parallel]" in said.err


@pytest.mark.parametrize("name", BIG)
def test_the_big_configs_fit_into_the_gpus_that_they_name(name: str) -> None:
    config = load_config(name)
    found = estimate(read_shape(config.model)[0], config.trainer, config.model.dtype)
    assert found.largest.total < 0.6 * 80e9

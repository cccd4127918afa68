"""Mixtures, and adapters on experts, for nodes that do not serve them are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config, ConfigError, config_from_table, is_mixture, load_config
from async_rl.inference_config import node_groups
from async_rl.run.checks import check_mixture
from async_rl.run.cli import main

MIXTURE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BIG = ("qwen3-30b-a3b-megatron", "trillion-class")


def config_of(folder: Path, model: dict[str, Any], engine: str = "vllm", **trainer: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(model))
    table = {
        "model": {"path": str(folder)}, "task": {"kind": "digit_sort"}, "inference": {"engine": engine},
        "trainer": trainer,
    }  # fmt: skip
    return config_from_table(table, "test.toml")


def check(config: Config) -> None:
    check_mixture(config, node_groups(config.inference))


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]])
def test_adapters_on_experts_are_refused_with_what_to_set(targets: list[str], tmp_path: Path) -> None:
    config = config_of(tmp_path, MIXTURE, targets=targets)
    others = 'engine = "torch" or engine = "sglang"'
    with pytest.raises(ConfigError, match=rf'engine = "vllm" serves no adapters on experts.*q_proj.*{others}'):
        check(config)


def test_what_a_node_can_serve_is_not(tmp_path: Path) -> None:
    check(config_of(tmp_path, MIXTURE, targets=ATTENTION))
    check(config_of(tmp_path, MIXTURE, "torch"))
    check(config_of(tmp_path, MIXTURE, "sglang"))
    check(config_of(tmp_path, MIXTURE | {"mlp_only_layers": [0]}, "torch"))
    check(config_of(tmp_path, {"model_type": "qwen3", "num_hidden_layers": 2}))
    check(config_of(tmp_path, {"model_type": "another", "n_layers": 2, "num_experts": 8, "moe_topk": 2}, "torch"))


@pytest.mark.parametrize("shape", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_layers_that_sglang_would_give_experts_are_refused_by_number(shape: dict[str, Any], tmp_path: Path) -> None:
    """Whatever is trained: it serves another model."""
    for targets in ([], ATTENTION):
        with pytest.raises(ConfigError, match=r'engine = "sglang": layers \(0,\) have no experts'):
            check(config_of(tmp_path, MIXTURE | shape, "sglang", targets=targets))
    check(config_of(tmp_path, MIXTURE | shape | {"model_type": "glm4_moe"}, "sglang"))


@pytest.mark.parametrize("name", BIG)
def test_the_big_configs_adapt_what_their_nodes_serve(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert is_mixture(config)  # by the shape that is shipped
    check(config)


def test_a_dry_run_refuses_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart-moe", "--dry-run", "--set", "inference.engine=vllm",
                 "--set", "algorithm.router_replay=none"]) == 1  # fmt: skip
    assert '[inference] engine = "vllm" serves no adapters on experts' in capfd.readouterr().err


def test_the_group_is_named_whose_nodes_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    groups = [{"name": "plain", "nodes": 1, "engine": "torch"}, {"name": "fast", "nodes": 1, "engine": "vllm"}]
    table = {"model": {"path": str(tmp_path)}, "task": {"kind": "digit_sort"}, "inference": {"group": groups}}
    with pytest.raises(ConfigError, match=r"\[\[inference.group\]\] 'fast' engine = \"vllm\""):
        check(config_from_table(table, "test.toml"))


def test_a_model_is_a_mixture_by_its_config_or_by_what_it_will_be_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "empty"))
    assert is_mixture(load_config("quickstart-moe"))
    assert not is_mixture(load_config("quickstart"))
    assert is_mixture(config_of(tmp_path, MIXTURE))
    assert is_mixture(config_of(tmp_path, {"text_config": MIXTURE}))
    assert not is_mixture(config_of(tmp_path, MIXTURE | {"num_experts": 0}))
    (tmp_path / "config.json").write_text("[]")
    assert not is_mixture(load_config("quickstart", [f"model.path={tmp_path}"]))

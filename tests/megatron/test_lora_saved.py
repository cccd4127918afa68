"""A checkpoint of one layout goes on under any other; what is exported is the same policy to whoever loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_ranks import SEED, random_adapter, trainer_config
from merged_adapters import merged_logits
from peft import PeftModel
from rank_pool import run_ranks
from safetensors.torch import load_file, save_file
from sharded_models import make_model
from transformers import AutoModelForCausalLM

from async_rl.policy.adapter import read_adapter
from trainer import optimizer_state
from trainer.export import export, read_policy
from trainer.lora_weights import LoraWeights
from trainer.megatron.saved import SHARDS_KEY, read_index
from trainer.optimizer_state import Counters

SEQUENCE = {"tensor": 2, "sequence": True}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"tensor": 2, "pipeline": 2},
        SEQUENCE | {"data": 2},
        {"pipeline": 4},
    ],
    "mixture": [
        SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2},
        {"pipeline": 2, "data": 2, "expert": 2},
        {"data": 4, "expert": 4},
    ],
    "shared": [
        {"data": 4, "expert": 2},
        SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2},
    ],
}
"""Layouts, of which each goes on from the one before."""
KEYS: dict[str, dict[str, Any]] = {"dense": {}, "mixture": {}, "shared": {"expert_adapters": "shared_outer"}}
IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    """The model of each chain."""
    dense, mixture = (str(make_model(kind, folder / kind)) for kind in ("dense", "mixture"))
    return {"dense": dense, "mixture": mixture, "shared": mixture}


def case_of(paths: dict[str, str], kind: str, number: int) -> dict[str, Any]:
    return {"path": paths[kind], "parallel": CHAINS[kind][number], "recompute": False, "trainer": KEYS[kind]}


@pytest.fixture(scope="module")
def chains(folder: Path, paths: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Each chain of layouts: the first makes a checkpoint, each next goes on from the one before. By layout what rank 0
    found; the files are in `folder`, KIND-NUMBER."""
    found = {}
    for kind, layouts in CHAINS.items():
        cases = [
            case_of(paths, kind, number)
            | {
                "save": str(folder / f"{kind}-{number}"),
                "load": str(folder / f"{kind}-{number - 1}") if number else None,
            }
            for number in range(len(layouts))
        ]
        payload = {"tensors": random_adapter(Path(paths[kind]), trainer_config(**KEYS[kind])), "cases": cases}
        found[kind] = run_ranks(4, "lora_ranks:resume", payload)[0]
    return found


@pytest.mark.parametrize("kind", CHAINS)
def test_a_checkpoint_goes_on_under_another_layout(chains: dict[str, Any], folder: Path, kind: str) -> None:
    first, *others = chains[kind]
    files = [len(list((folder / f"{kind}-{number}").glob("shard-*"))) for number in range(len(others) + 1)]
    print(f"{kind}: files {files}; losses {[each['loss'] for each in chains[kind]]}")
    for other in others:
        assert other["digest"] == first["digest"]
        assert other["steps"] == first["steps"] == 2
        assert other["loss"] == pytest.approx(first["loss"], rel=1e-6)
        assert other["norm"] == pytest.approx(first["norm"], rel=1e-5)
        gap = max(np.abs(other["after"][name] - values).max() for name, values in first["after"].items())
        assert gap < 2e-5  # a step is 1e-3; where a gradient is nearly nothing, noise says how far one goes


@pytest.mark.parametrize("kind", CHAINS)
def test_what_is_exported_gives_one_models_logits(
    chains: dict[str, Any], folder: Path, paths: dict[str, str], kind: str
) -> None:
    path, made = paths[kind], folder / f"{kind}-1"
    tensors, config = read_adapter(made.with_suffix(".safetensors"), chains[kind][1]["digest"])
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        wanted = merged_logits(base, tensors, config["lora_alpha"] / config["r"], IDS)
        merged = AutoModelForCausalLM.from_pretrained(made.with_suffix(".merged"), dtype=torch.float32)
        assert _gap(merged(IDS).logits, wanted) < 1e-5
        by_peft = PeftModel.from_pretrained(base, str(made.with_suffix(".peft")))
        assert _gap(by_peft(IDS).logits, wanted) < 1e-5
        assert _gap(wanted, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(IDS).logits) > 1e-3


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", CHAINS)
def test_the_command_exports_a_checkpoint_in_parts(
    chains: dict[str, Any], folder: Path, paths: dict[str, str], tmp_path: Path, kind: str
) -> None:
    checkpoint = _with_manifest(folder / f"{kind}-0", tmp_path / "v00000002")
    policy = read_policy(checkpoint)
    tensors, _ = read_adapter((folder / f"{kind}-0").with_suffix(".safetensors"))
    assert policy.base_model == paths[kind]
    assert policy.tensors.keys() == tensors.keys()
    assert all(torch.equal(policy.tensors[name], tensors[name]) for name in tensors)
    export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def _with_manifest(source: Path, checkpoint: Path) -> Path:
    from trainer.checkpoint import write_checkpoint

    def copy(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)

    return write_checkpoint(checkpoint.parent, int(checkpoint.name[1:]), copy, {})


@pytest.mark.parametrize("kind", CHAINS)
def test_a_checkpoint_of_the_torch_backend_goes_on(paths: dict[str, str], tmp_path: Path, kind: str) -> None:
    weights = of_torch(paths, kind)
    model = weights.model
    ids = torch.arange(1, 30)[None]
    for _ in range(2):
        weights.zero()
        model(ids).logits.log_softmax(-1)[0, :, 7].sum().backward()
        weights.move(weights.norm(), 1e-3)
    (tmp_path / "torch").mkdir()
    weights.save(tmp_path / "torch")
    case = case_of(paths, kind, 0) | {"load": str(tmp_path / "torch"), "save": str(tmp_path / "parts")}
    found = run_ranks(4, "lora_ranks:resume", {"tensors": {}, "cases": [case]})[0][0]
    assert found["digest"] == weights.export(tmp_path / "adapter.safetensors")
    assert found["steps"] == 2
    state = {name: weights.optimizer.state[parameter] for name, parameter in weights.parameters.items()}
    shards = [load_file(each) for each in sorted((tmp_path / "parts").glob("shard-*"))]
    for moment in ("exp_avg", "exp_avg_sq"):
        total = sum(float(part[key].double().sum()) for part in shards for key in part if key.startswith(f"{moment}/"))
        assert total == pytest.approx(sum(float(each[moment].double().sum()) for each in state.values()), rel=1e-9)


@pytest.mark.parametrize("kind", CHAINS)
def test_the_torch_backend_goes_on_from_a_checkpoint_in_parts(
    chains: dict[str, Any], folder: Path, paths: dict[str, str], tmp_path: Path, kind: str
) -> None:
    weights = of_torch(paths, kind)
    weights.load(folder / f"{kind}-0")
    assert weights.steps == 2
    assert weights.export(tmp_path / "adapter.safetensors") == chains[kind][0]["digest"]
    weights.save(tmp_path)
    found = load_file(tmp_path / optimizer_state.OPTIMIZER_FILE)
    parts = read_index(folder / f"{kind}-0", optimizer_state.read_counters(folder / f"{kind}-0"))
    compared = 0
    for (moment, name), tiles in parts.tiles.items():
        if moment == "value":
            continue
        for tile in tiles:
            part = load_file(tile.path)[tile.key]
            assert torch.equal(found[f"{moment}/{name}"][slice(*tile.rows), slice(*tile.columns)], part)
            compared += part.numel()
        assert float(found[f"step/{name}"]) == parts.steps[name] == 2
    assert compared == 2 * sum(parameter.numel() for parameter in weights.parameters.values())
    assert {key.partition("/")[2] for key in found} == set(weights.parameters)


def of_torch(paths: dict[str, str], kind: str) -> LoraWeights:
    model = AutoModelForCausalLM.from_pretrained(paths[kind], dtype=torch.float32)
    return LoraWeights(model, trainer_config(**KEYS[kind]), SEED, paths[kind])


def test_the_canary_is_that_of_the_torch_backend(paths: dict[str, str], tmp_path: Path) -> None:
    """Of the largest noise, because the scores do not move."""
    file = tmp_path / "torch.safetensors"
    digests = [
        of_torch(paths, kind).canary(file, SEED, lambda: [np.zeros(1, np.float32)]).digest
        for kind in CHAINS
        for _ in range(2)
    ]
    cases = [case_of(paths, kind, number) for kind in CHAINS for number in range(2)]
    ranks = run_ranks(4, "lora_ranks:canary", {"cases": cases, "folder": str(tmp_path)})
    assert ranks == [digests] * 4


def test_an_adapter_is_float32_on_a_model_in_bfloat16(paths: dict[str, str], tmp_path: Path) -> None:
    tensors = random_adapter(Path(paths["mixture"]), trainer_config())
    payload = {"case": case_of(paths, "mixture", 0), "tensors": tensors, "folder": str(tmp_path)}
    first, *others = run_ranks(4, "lora_ranks:half", payload)
    assert all((each["loss"], each["norm"]) == (first["loss"], first["norm"]) for each in others)
    assert first["dtypes"] == {"torch.float32"}
    found, config = read_adapter(tmp_path / "adapter.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(paths["mixture"], dtype=torch.bfloat16)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    scale = config["lora_alpha"] / config["r"]
    name = "model.layers.1.self_attn.k_proj"
    b, a = (found[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    wanted = base.get_parameter(f"{name}.weight").float() + scale * (b @ a)
    assert ((merged.get_parameter(f"{name}.weight") - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6).all()


def test_files_that_are_not_whole_are_refused_by_every_rank(
    chains: dict[str, Any], folder: Path, paths: dict[str, str], tmp_path: Path
) -> None:
    source = folder / "mixture-0"
    shards = sorted(each.name for each in source.glob("shard-*"))

    def broken(name: str) -> Path:
        return Path(shutil.copytree(source, tmp_path / name))

    (broken("missing") / shards[1]).unlink()
    cut = broken("cut") / shards[0]
    cut.write_bytes(cut.read_bytes()[:-100])
    _rewrite(broken("moved") / shards[0], offset=True)
    _rewrite(broken("other-rank") / shards[0], config={"r": 8})
    (broken("no-counters") / "backend.json").unlink()
    _as_kind(broken("sketch"))
    folders = [str(each) for each in (*sorted(tmp_path.iterdir()), folder / "dense-0", folder / "shared-0")]
    payload = {"case": case_of(paths, "mixture", 1), "folders": folders}
    ranks = run_ranks(4, "lora_ranks:refuse", payload)
    said = ranks[0]
    assert all(each[name] == said[name] or f"rank 0: {said[name]}" in each[name] for each in ranks for name in said)
    assert all(each.keys() == {Path(each).name for each in folders} for each in ranks)
    assert f"{shards[1]} is missing" in said["missing"]
    assert "cannot be read" in said["cut"]
    assert "not inside of" in said["moved"] or "do not make up the whole tensor" in said["moved"]
    assert "is of another checkpoint" in said["other-rank"]
    assert "backend.json: cannot be read" in said["no-counters"]
    assert 'is of [trainer] kind = "sketch"' in said["sketch"]
    assert "resume with the model" in said["dense-0"]
    assert "resume with the model and the expert_adapters" in said["shared-0"]


def _rewrite(path: Path, *, offset: bool = False, config: dict[str, Any] | None = None) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        table = json.loads(file.metadata()[SHARDS_KEY])
    if offset:
        part = table["tensors"][sorted(table["tensors"])[0]]
        part["offset"] = [part["offset"][0] + 1, part["offset"][1]]
    if config:
        table["config"] = json.dumps(json.loads(table["config"]) | config)
    save_file(load_file(path), path, metadata={SHARDS_KEY: json.dumps(table)})


def _as_kind(folder: Path) -> None:
    counters = optimizer_state.read_counters(folder)
    optimizer_state.write_counters(folder, Counters(counters.optimizer_steps, counters.digest, "", "sketch"))

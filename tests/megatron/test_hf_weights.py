"""A model's weights from its folder to the ranks and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankFailed, run_ranks
from safetensors.torch import load_file, save_file
from sharded_models import make_model
from transformers import AutoModelForCausalLM

SEQUENCE = {"tensor": 2, "sequence": True}
LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "dense", {"tensor": 2}),
    (2, "tied", {"tensor": 2}),
    (2, "tied", {"pipeline": 2}),
    (2, "leading", {"data": 2, "expert": 2}),
    (4, "dense", {"tensor": 2, "pipeline": 2}),
    (4, "dense", {"pipeline": 4}),
    (4, "mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}),
    (4, "mixture", SEQUENCE | {"pipeline": 2, "expert": 2}),
    (4, "leading", {"data": 4, "expert": 4}),
]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_read_and_written_again_is_the_same_bit_for_bit(tmp_path: Path, world: int) -> None:
    cases, made = [], {}
    for number, (ranks, kind, parallel) in enumerate(LAYOUTS):
        if ranks == world:
            if kind not in made:
                made[kind] = bits(stored(make_model(kind, tmp_path / kind)))
            cases.append({"path": str(tmp_path / kind), "parallel": parallel, "out": str(tmp_path / f"out{number}")})
    run_ranks(world, "sharded_models:write_again", cases)
    for case in cases:
        written = bits(stored(Path(case["out"])))
        assert written == made[Path(case["path"]).name], case
    # And transformers takes it: it reads the configuration too.
    AutoModelForCausalLM.from_pretrained(cases[-1]["out"])


def with_fused_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the kind "leading"."""
    fused = dict(tensors)
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = {
            part: torch.stack([fused.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        fused[f"{prefix}.gate_up_proj"] = torch.cat([each["gate"], each["up"]], dim=1)
        fused[f"{prefix}.down_proj"] = each["down"]
    return fused


def test_a_checkpoint_may_have_several_files_and_fused_experts(tmp_path: Path) -> None:
    wanted = stored(make_model("leading", tmp_path / "plain"))
    fused = with_fused_experts(wanted)
    folder = tmp_path / "fused"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    names = sorted(fused)
    weight_map = {name: f"part-{place % 2}.safetensors" for place, name in enumerate(names)}
    for part in (0, 1):
        save_file({name: fused[name] for name in names[part::2]}, folder / f"part-{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    parallel = SEQUENCE | {"expert": 1, "expert_tensor": 2}
    out = tmp_path / "out"
    run_ranks(2, "sharded_models:write_again", [{"path": str(folder), "parallel": parallel, "out": str(out)}])
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert bits(stored(out)) == bits(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "missing model.layers.2.mlp.up_proj.weight, unknown none"),
        ("unknown", "missing none, unknown model.layers.0.self_attn.q_proj.bias"),
        ("shape", r"model.norm.weight has the shape \[31\], its config.json says \[32\]"),
        ("nothing", "neither model.safetensors nor model.safetensors.index.json can be read"),
        ("broken", "can be read|cannot be read"),
    ],
)
def test_tensors_that_do_not_fit_are_one_clear_error(tmp_path: Path, change: str, message: str) -> None:
    path = make_model("dense", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    if change == "missing":
        del tensors["model.layers.2.mlp.up_proj.weight"]
    elif change == "unknown":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    elif change == "shape":
        tensors["model.norm.weight"] = torch.zeros(31)
    if change != "nothing":
        save_file(tensors, path)
    if change == "broken":
        path.write_bytes(path.read_bytes()[:-50])
    case = {"path": str(tmp_path), "parallel": {}, "out": str(tmp_path / "out")}
    with pytest.raises(RankFailed, match=f"AsyncRLError: .*{message}"):
        run_ranks(1, "sharded_models:write_again", [case])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fewer", r"experts.gate_up_proj has the shape \[4, 32, 32\], its config.json says \[8, 32, 32\]"),
        ("more", r"experts.gate_up_proj has the shape \[16, 32, 32\], its config.json says \[8, 32, 32\]"),
        ("missing", "missing model.layers.1.mlp.experts.3.up_proj.weight, unknown none"),
    ],
)
def test_experts_of_another_number_are_one_clear_error(tmp_path: Path, change: str, message: str) -> None:
    path = make_model("leading", tmp_path) / "model.safetensors"
    tensors = stored(tmp_path)
    if change == "missing":
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    else:
        tensors = with_fused_experts(tensors)
        for name, value in tensors.items():
            if ".experts." in name:
                tensors[name] = value[:4].clone() if change == "fewer" else torch.cat([value, value])
    path.unlink()
    save_file(tensors, path)
    case = {"path": str(tmp_path), "parallel": {}, "out": str(tmp_path / "out")}
    with pytest.raises(RankFailed, match=f"AsyncRLError: .*{message}"):
        run_ranks(1, "sharded_models:write_again", [case])

"""What SGLang would refuse of an adapter, leave out, or end at, without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from async_rl.policy.adapter import split_tensor_name, tensor_name
from inference.engine import EngineError
from inference.sglang_adapters import check_adapter, is_whole, write_whole

EXPERTS, RANK, HIDDEN, INSIDE = 3, 2, 6, 32
SHAPES = {"gate_proj": (INSIDE, HIDDEN), "up_proj": (INSIDE, HIDDEN), "down_proj": (HIDDEN, INSIDE)}
OUTER = {"gate_proj": "A", "up_proj": "A", "down_proj": "B"}
PATH = "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


def adapter(projections: frozenset[str], shared: bool, inside: int = INSIDE) -> Tensors:
    made: Tensors = {}
    for number, projection in enumerate(sorted(projections)):
        rows, columns = (inside if size == INSIDE else size for size in SHAPES[projection])
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            of_all = shared and OUTER[projection] == part
            for expert in [None] if of_all else range(EXPERTS):
                module = f"{PATH}.{projection}" if expert is None else f"{PATH}.{expert}.{projection}"
                made[tensor_name(module, part)] = torch.full(shape, 10.0 * number + (expert or 0) + 1)
    return made


def written(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({split_tensor_name(name)[0].rpartition(".")[2] for name in tensors})
    (folder / "adapter_config.json").write_text(json.dumps({"target_modules": targets} | config))
    return folder


@settings(max_examples=20)
@given(st.frozensets(st.sampled_from(sorted(SHAPES)), min_size=1), st.booleans())
def test_whole_it_has_every_experts_own_tensors_and_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, projections: frozenset[str], shared: bool
) -> None:
    place = tmp_path_factory.mktemp("whole")
    tensors = adapter(projections, shared)
    folder = written(place / "given", tensors)
    half = len(projections & {"gate_proj", "up_proj"}) == 1
    assert is_whole(folder) == (not shared and not half)
    write_whole(folder, place / "no model is looked into", place / "whole")
    assert is_whole(place / "whole")
    found = load_file(place / "whole" / "adapter_model.safetensors")
    added = {"gate_proj", "up_proj"} if half else set()
    assert found.keys() == {
        tensor_name(f"{PATH}.{expert}.{projection}", part)
        for expert in range(EXPERTS)
        for projection in projections | added
        for part in "AB"
    }
    for name, tensor in found.items():
        module, part = split_tensor_name(name)
        _, expert, projection = module.rsplit(".", 2)
        if projection in projections:
            of_all = tensors.get(tensor_name(f"{PATH}.{projection}", part))
            assert torch.equal(tensor, tensors[name] if of_all is None else of_all), expert
        else:
            assert not tensor.any()
            assert tensor.shape == ((RANK, HIDDEN) if part == "A" else (INSIDE, RANK))
    config = json.loads((place / "whole" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == projections | added


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("projection", sorted(SHAPES))
def test_a_width_at_which_it_would_end_is_refused_on_a_cpu_alone(
    tmp_path: Path, projection: str, shared: bool
) -> None:
    folder = written(tmp_path / "narrow", adapter(frozenset([projection]), shared, inside=48))
    with pytest.raises(EngineError, match=rf"adapter a: .*{projection}.* has an intermediate width of 48: on a CPU"):
        check_adapter("a", folder, "cpu")
    check_adapter("a", folder, "cuda")
    check_adapter("a", written(tmp_path / "wide", adapter(frozenset([projection]), shared)), "cpu")


def test_what_it_would_scale_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="use_rslora"):
        check_adapter("a", written(tmp_path / "a", adapter(frozenset(SHAPES), False), use_rslora=True), "cuda")

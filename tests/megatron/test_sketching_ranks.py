"""Sketches of gradients on ranks equal those of the torch backend, and steps on parts of weights those on whole."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from lora_ranks import SEED, weighted
from rank_pool import run_ranks
from sharded_models import TEMPERATURE, make_model, sequences
from transformers import AutoModelForCausalLM

from async_rl.config import TrainerConfig
from async_rl.policy.factors import encode
from trainer.sketch.applying import take_step
from trainer.sketch.attach import Attached, attach_sketches

SEQUENCE = {"tensor": 2, "sequence": True}
Layout = tuple[str, dict[str, Any], bool]
ON_TWO: list[Layout] = [
    ("dense", {"tensor": 2}, False),
    ("dense", SEQUENCE, False),
    ("dense", SEQUENCE, True),
    ("dense", {"pipeline": 2}, False),
    ("mixture", {"data": 2, "expert": 2}, False),
    ("mixture", SEQUENCE | {"expert_tensor": 2}, False),
]
ON_FOUR: list[Layout] = [
    ("dense", SEQUENCE | {"pipeline": 2}, True),
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, True),
]


class Expected(NamedTuple):
    """Modules (path, rows, columns), sketches and factors by module path, and the weights after the factors."""

    path: Path
    modules: list[tuple[str, int, int]]
    sketches: dict[str, npt.NDArray[np.float32]]
    factors: dict[str, tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]]
    weights: dict[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def expected(folder: Path, kind: str) -> Expected:
    path = make_model(kind, folder / kind)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    attached = attach_sketches(model, TrainerConfig(kind="sketch", rank=8), SEED)
    for index, micro_batch in enumerate(sequences()):
        parts = []
        for tokens in micro_batch:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1] / TEMPERATURE, dim=-1)
            parts.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
        weighted(index, torch.cat(parts)).backward()
    factors = {name: encode(view * 1e-4) for name, view in attached.sketches.views.items()}
    take_step(attached.blocks, factors, attached.projections, 0)
    sketches, modules = _by_module(attached)
    q = _by_expert({name: each.q for name, each in factors.items()})
    s = _by_expert({name: each.s for name, each in factors.items()}, dimensions=2)
    weights = _by_expert({name: block.weight for name, block in attached.blocks.items()})
    return Expected(path, modules, sketches, {name: (q[name], s[name]) for name in q}, weights)


def _by_module(attached: Attached) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
    sketches = _by_expert(dict(attached.sketches.views))
    columns = {name: block.columns for name, block in attached.blocks.items()}
    shared = {name: re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in sketches}
    return sketches, [(name, len(array), columns[shared[name]]) for name, array in sorted(sketches.items())]


def _by_expert(tensors: dict[str, torch.Tensor], dimensions: int = 3) -> dict[str, Any]:
    """Of stacks each expert's own."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == dimensions:
            for expert, own in enumerate(tensor):
                out[name.replace(".experts.", f".experts.{expert}.")] = own.numpy().copy()
        else:
            out[name] = tensor.numpy().copy()
    return out


@pytest.mark.parametrize(("world", "layouts"), [(2, ON_TWO), (4, ON_FOUR)])
def test_sketches_and_steps_on_parts_are_those_of_one_process(folder: Path, world: int, layouts: list[Layout]) -> None:
    wanted = [expected(folder, kind) for kind, _, _ in layouts]
    cases = [
        {"path": str(one.path), "parallel": parallel, "recompute": recompute,
         "modules": one.modules, "factors": one.factors}
        for one, (_, parallel, recompute) in zip(wanted, layouts, strict=True)
    ]  # fmt: skip
    by_rank = run_ranks(world, "sketch_ranks:sketch", {"cases": cases})
    for number, (one, layout) in enumerate(zip(wanted, layouts, strict=True)):
        ranks = [results[number] for results in by_rank]
        worst, rows = 0.0, dict.fromkeys(one.sketches, 0)
        for each in ranks:
            for (name, first, last), part in each["parts"].items():
                whole = one.sketches[name]
                worst = max(worst, float(np.abs(part - whole[first:last]).max() / np.abs(whole).max()))
                rows[name] += (last - first) * (name in each["owned"])
        print(f"{layout}: sketches {worst:.1e}")
        assert worst <= 1e-5, layout
        assert all(count == len(one.sketches[name]) for name, count in rows.items()), layout
        norm = np.sqrt(sum((array.astype(float) ** 2).sum() for array in one.sketches.values()))
        assert {each["norm"] for each in ranks} == {ranks[0]["norm"]}
        assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-5)
        for name, array in one.weights.items():
            assert np.array_equal(ranks[0]["weights"][f"{name}.weight"], array), f"{layout}: {name}, bit for bit"

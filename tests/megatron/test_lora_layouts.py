"""Gradients and steps of adapters in many layouts equal those of Hugging Face's model with merged deltas."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lora_ranks import STEPS, Arrays, OneProcess, fresh, random_adapter, trainer_config
from near import gaps
from rank_pool import run_ranks
from sharded_models import make_model

from trainer.adamw import AdamW

SEQUENCE = {"tensor": 2, "sequence": True}
SHARED = {"expert_adapters": "shared_outer"}
SOME_EXPERTS = {"targets": ("o_proj", "up_proj", "down_proj")}
SOME = {"targets": ("q_proj", "v_proj", "up_proj")}
Layout = tuple[str, dict[str, Any], bool, dict[str, Any]]
ON_TWO: list[Layout] = [
    ("dense", {"tensor": 2}, False, SOME),
    ("dense", SEQUENCE, False, {}),
    ("dense", {"pipeline": 2}, True, {}),
    ("dense", {"data": 2}, False, {}),
    ("mixture", {"data": 2, "expert": 2}, True, SHARED),
    ("mixture", {"data": 2, "expert_tensor": 2}, False, SHARED),
    ("mixture", SEQUENCE | {"expert": 2}, False, {}),
]
ON_FOUR: list[Layout] = [
    ("dense", SEQUENCE | {"pipeline": 2}, True, {}),
    ("mixture", {"pipeline": 2, "data": 2, "expert": 2}, True, {}),
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, False, SHARED),
    ("mixture", SEQUENCE | {"data": 2, "expert": 4}, True, SOME_EXPERTS),
    ("leading", SEQUENCE | {"pipeline": 2, "expert_tensor": 2}, True, {}),
]
# Each with one part less than some layout above, or one that another has.
MORE_ON_TWO: list[Layout] = [
    ("dense", {"tensor": 2}, False, {}),
    ("dense", SEQUENCE, True, SOME),
    ("mixture", {"data": 2}, False, {}),
    ("mixture", {"data": 2, "expert": 2}, False, {}),
    ("mixture", SEQUENCE, True, {}),
    ("mixture", SEQUENCE | {"expert_tensor": 2}, False, {}),
    ("leading", {"pipeline": 2}, True, {}),
]
MORE_ON_FOUR: list[Layout] = [
    ("dense", {"tensor": 2, "pipeline": 2}, False, {}),
    ("dense", SEQUENCE | {"data": 2}, False, {}),
    ("mixture", {"data": 4, "expert": 4}, False, {}),
    ("mixture", {"data": 4, "expert": 2}, False, SHARED),
    ("mixture", SEQUENCE | {"pipeline": 2, "expert": 2}, True, {}),
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, False, {}),
]
CASES = [
    (1, [("mixture", {}, True, SHARED)]),
    (2, ON_TWO),
    (4, ON_FOUR),
    pytest.param(2, MORE_ON_TWO, marks=pytest.mark.long),
    pytest.param(4, MORE_ON_FOUR, marks=pytest.mark.long),
]


class Expected(NamedTuple):
    """Of one process, see `lora_ranks.learn`; `rate` is that of SGD."""

    path: Path
    tensors: Arrays
    fresh: Arrays
    rate: float
    loss: float
    gradients: Arrays
    sgd: Arrays
    adamw: list[tuple[float, float]]
    after: Arrays


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def expected(folder: Path, kind: str, keys: tuple[tuple[str, Any], ...]) -> Expected:
    trainer = trainer_config(**dict(keys))
    path = folder / kind
    if not path.exists():
        make_model(kind, path)
    tensors = random_adapter(path, trainer)
    start = {name: parameter.detach().numpy() for name, parameter in fresh(path, trainer)[1].items()}
    one = OneProcess(path, tensors, trainer.alpha / trainer.rank)
    loss = one.loss()
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in one.parameters.items()}  # type: ignore[union-attr]
    rate = 0.3 / float(np.sqrt(sum((array.astype(float) ** 2).sum() for array in gradients.values())))
    for step in range(STEPS):
        if step:
            one.loss()
        with torch.no_grad():
            for parameter in one.parameters.values():
                parameter.add_(parameter.grad, alpha=-rate)  # type: ignore[arg-type]
    sgd = one.arrays()
    one.reset()
    optimizer = AdamW(one.parameters, trainer)
    adamw = []
    for _ in range(STEPS):
        adamw.append((one.loss(), optimizer.norm()))
        optimizer.move(adamw[-1][1], 1e-3)
    adamw.append((one.loss(), optimizer.norm()))
    return Expected(path, tensors, start, rate, loss, gradients, sgd, adamw, one.arrays())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world", "layouts"), CASES)
def test_every_layout_learns_what_one_process_does(folder: Path, world: int, layouts: list[Layout]) -> None:
    wanted = [expected(folder, kind, tuple(keys.items())) for kind, _, _, keys in layouts]
    cases = [
        {"path": str(each.path), "parallel": parallel, "recompute": recompute, "trainer": keys,
         "tensors": each.tensors, "rate": each.rate}
        for each, (_, parallel, recompute, keys) in zip(wanted, layouts, strict=True)
    ]  # fmt: skip
    by_rank = run_ranks(world, "lora_ranks:learn", {"cases": cases}, timeout=380)
    for number, (one, layout) in enumerate(zip(wanted, layouts, strict=True)):
        _check(str(layout), one, [results[number] for results in by_rank])


def _check(name: str, one: Expected, ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]
    assert found["fresh"].keys() == one.fresh.keys(), name
    assert all(np.array_equal(found["fresh"][key], one.fresh[key]) for key in one.fresh), name
    assert found["off"] == 0, name
    assert found["loss"] == pytest.approx(one.loss, rel=1e-5), name
    worst = {part: _gap(found[part], getattr(one, part)) for part in ("gradients", "sgd", "after")}
    of_adamw = np.abs(np.array(found["adamw"]) / np.array(one.adamw) - 1).max(0)
    print(
        f"{name}: gradients {worst['gradients']:.1e}, after {STEPS} of SGD {worst['sgd']:.1e}; of AdamW: loss "
        f"{of_adamw[0]:.1e}, norm {of_adamw[1]:.1e}, parameters {worst['after']:.1e}"
    )
    assert worst["gradients"] <= 1e-5, name
    assert worst["sgd"] <= 1e-5, name
    assert of_adamw.max() <= 1e-5, name  # not of NaN, which NumPy's maximum is where there is one
    hashes: dict[tuple[Any, ...], set[str]] = {}
    for each in ranks:
        assert each["adamw"] == found["adamw"], f"{name}: every rank has the same numbers"
        for part, digest in each["replicas"].items():
            hashes.setdefault(part, set()).add(digest)
    assert all(len(each) == 1 for each in hashes.values()), f"{name}: copies of a part are the same, bit for bit"


def _gap(found: Arrays, wanted: Arrays) -> float:
    return max(gaps(found, wanted).values())

"""Log-probabilities and gradients of the Megatron model in many layouts equal those of Hugging Face on one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from near import assert_near, gaps
from rank_pool import run_ranks
from sharded_models import make_model, of_one_process

SEQUENCE = {"tensor": 2, "sequence": True}
Layout = tuple[str, dict[str, Any], bool]
ON_TWO: list[Layout] = [
    ("dense", {"tensor": 2}, False),
    ("dense", SEQUENCE, True),
    ("dense", {"pipeline": 2}, True),
    ("dense", {"data": 2}, False),
    ("tied", {"tensor": 2}, False),
    ("tied", {"pipeline": 2}, False),
    ("mixture", {"data": 2, "expert": 2}, False),
    ("mixture", {"data": 2, "expert_tensor": 2}, False),
    ("mixture", SEQUENCE | {"expert": 2}, False),
    ("leading", {"pipeline": 2}, True),
]
ON_FOUR: list[Layout] = [
    ("dense", SEQUENCE | {"pipeline": 2}, True),
    ("dense", SEQUENCE | {"data": 2}, False),
    ("mixture", {"data": 4, "expert": 2}, True),
    ("mixture", {"pipeline": 2, "data": 2, "expert": 2}, False),
    ("mixture", SEQUENCE | {"data": 2, "expert": 2, "expert_tensor": 2}, False),
    ("leading", SEQUENCE | {"pipeline": 2, "expert_tensor": 2}, True),
]
# Each with one part less than some layout above, or one that another has.
MORE_ON_TWO: list[Layout] = [
    ("dense", {"tensor": 2}, True),
    ("dense", SEQUENCE, False),
    ("dense", {"pipeline": 2}, False),
    ("mixture", {"data": 2}, False),
    ("mixture", {"data": 2, "expert": 2}, True),
    ("mixture", SEQUENCE, False),
    ("mixture", SEQUENCE | {"expert_tensor": 2}, True),
    ("leading", SEQUENCE | {"expert": 2}, True),
]
MORE_ON_FOUR: list[Layout] = [
    ("dense", {"tensor": 2, "pipeline": 2}, False),
    ("dense", {"pipeline": 4}, False),
    ("mixture", {"data": 4, "expert": 4}, False),
    ("mixture", SEQUENCE | {"pipeline": 2, "expert": 2}, True),
    ("mixture", SEQUENCE | {"data": 2, "expert": 4}, True),
    ("mixture", {"data": 4, "expert": 2, "expert_tensor": 2}, True),
]
CASES = [
    (1, [("mixture", {}, True)]),
    (2, ON_TWO),
    (4, ON_FOUR),
    pytest.param(2, MORE_ON_TWO, marks=pytest.mark.long),
    pytest.param(4, MORE_ON_FOUR, marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def expected(folder: Path, kind: str) -> tuple[Path, list[npt.NDArray[np.float32]], dict[str, npt.NDArray[np.float32]]]:
    path = make_model(kind, folder / kind)
    return path, *of_one_process(path)


@pytest.mark.parametrize(("world", "layouts"), CASES)
def test_every_layout_computes_what_one_process_does(folder: Path, world: int, layouts: list[Layout]) -> None:
    cases = [
        {"path": str(expected(folder, kind)[0]), "parallel": parallel, "recompute": recompute, "learns": learns}
        for kind, parallel, recompute in layouts
        for learns in (True, False)
    ]
    by_rank = run_ranks(world, "sharded_models:compute", cases)
    for number, case in enumerate(cases):
        kind, parallel, recompute = layouts[number // 2]
        name = f"{kind} {parallel} recompute={recompute} learns={case['learns']}"
        _, logprobs, gradients = expected(folder, kind)
        _check_logprobs(name, [results[number]["logprobs"] for results in by_rank], logprobs)
        if case["learns"]:
            assert_near(by_rank[0][number]["gradients"], gradients, f"{name}: gradients")


def _check_logprobs(name: str, found: list[dict[int, Any]], wanted: list[npt.NDArray[np.float32]]) -> None:
    assert {index for ranks in found for index in ranks} == set(range(len(wanted))), name
    for ranks in found:
        if ranks:  # of the last stage
            assert_near(ranks, {index: wanted[index] for index in ranks}, f"{name}: log-probabilities")


def test_in_bfloat16_it_is_as_near_to_float32_as_hugging_face_is(folder: Path) -> None:
    parallel = SEQUENCE | {"expert": 2}
    for kind in ("dense", "leading"):
        path, exact, exact_gradients = expected(folder, kind)
        layout = parallel if kind == "leading" else SEQUENCE
        case = {"path": str(path), "parallel": layout, "recompute": True, "learns": True, "dtype": "bfloat16"}
        (found,) = run_ranks(2, "sharded_models:compute", [case])[0]
        theirs, gradients = of_one_process(path, torch.bfloat16)
        ours = [found["logprobs"][index] for index in range(len(exact))]
        gap, allowed = (
            float(np.abs(np.concatenate(values) - np.concatenate(exact)).mean()) for values in (ours, theirs)
        )
        print(f"{kind}: mean gap {gap:.3f} nats, of Hugging Face {allowed:.3f}")
        assert gap <= 1.5 * allowed
        gap, allowed = (
            float(np.mean(list(gaps(values, exact_gradients, kind).values())))
            for values in (found["gradients"], gradients)
        )
        print(f"{kind}: gradients, mean over the tensors of their largest gap {gap:.3f}, of Hugging Face {allowed:.3f}")
        assert gap <= 1.5 * allowed

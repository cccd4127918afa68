"""One batch, one gradient: however it is cut into micro-batches, ordered, packed or spread over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gradient_batches
import numpy as np
import pytest
from gradient_batches import CASES, LENGTH, TRAINED, gradient, make_backend, make_batch, make_model

from trainer.backend import Sample
from trainer.torch_backend import TorchBackend

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
SPLITS = {1: 8 * LENGTH, 2: 4 * LENGTH, 8: 1}  # micro-batches: token budget
ORDERS = ((0, 1, 2, 3, 4, 5, 6, 7), (5, 2, 7, 0, 1, 3, 6, 4), (7, 6, 5, 4, 3, 2, 1, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def batch(folder: Path) -> list[Sample]:
    return make_batch(folder)


@pytest.fixture(scope="module", params=TOLERANCE)
def backend(request: pytest.FixtureRequest, folder: Path) -> TorchBackend:
    return make_backend(folder, CASES["ppo-token_mean"], request.param)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    assert np.linalg.norm(other) > 0
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def cut(backend: TorchBackend, budget: int) -> None:
    backend.trainer = type(backend.trainer)(rank=4, alpha=8.0, micro_batch_tokens=budget)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_same_for_every_split_and_order(
    backend: TorchBackend, batch: list[Sample], case: str
) -> None:
    backend.algorithm = CASES[case]
    cut(backend, SPLITS[1])
    whole = gradient(backend, batch)
    tolerance = TOLERANCE[str(backend.dtype).removeprefix("torch.")]
    for micro_batches, budget in SPLITS.items():
        cut(backend, budget)
        for order in ORDERS:
            permuted = [batch[index] for index in order]
            cuts = list(backend._micro_batches(permuted, backend._flatten(permuted)))
            assert len(cuts) == micro_batches
            assert distance(gradient(backend, permuted), whole) < tolerance


def test_the_cases_have_different_gradients(backend: TorchBackend, batch: list[Sample]) -> None:
    """Or the test above could not tell one denominator from another."""
    cut(backend, SPLITS[1])
    found = []
    for backend.algorithm in CASES.values():
        found.append(gradient(backend, batch))
    pairs = [(one, other) for index, one in enumerate(found) for other in found[:index]]
    assert min(distance(one, other) for one, other in pairs) > 1e-3


@pytest.mark.timeout(400)
def test_two_ranks_with_a_5_to_1_split_of_tokens_sum_to_the_gradient_of_one(folder: Path, batch: list[Sample]) -> None:
    assert sum(TRAINED[:6]) == 5 * sum(TRAINED[6:])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", gradient_batches.__file__, str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    parts = [np.load(folder / f"rank-{rank}.npz") for rank in range(2)]
    for dtype, tolerance in TOLERANCE.items():
        backend = make_backend(folder, CASES["ppo-token_mean"], dtype)
        for case, backend.algorithm in CASES.items():
            alone = gradient(backend, batch)
            for part in parts:
                assert distance(part[f"{case}-{dtype}"], alone) < tolerance, case

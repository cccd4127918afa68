"""RowAdam and the step's length against a literal transcription in float64, and what follows from the formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import AsyncRLError
from async_rl.policy.projection import projection_key, signs
from trainer.sketch.projections import Projections
from trainer.sketch.ratio import product_energy, step_size, weight_energy
from trainer.sketch.row_adam import EPSILON
from trainer.sketch.step import Memory, carried, directions_, growth

Array = npt.NDArray[np.float64]


def transcription(sketches: list[Array], beta2: float) -> tuple[Array, Array]:
    """The last step's direction and moment after these sketches of one matrix, line by line as published."""
    variance = np.zeros((sketches[0].shape[0], 1))
    for step, sketch in enumerate(sketches, start=1):
        variance = beta2 * variance + (1 - beta2) * np.mean(sketch**2, axis=1, keepdims=True)
        root = np.sqrt(variance / (1 - beta2**step))
        denominator = root + max(EPSILON * root.mean(), np.finfo(np.float32).tiny)
        scale = denominator.min() / denominator
        scale = scale / np.sqrt(np.mean(scale**2))
        direction = scale * sketch
        direction = direction * np.linalg.norm(sketch) / np.linalg.norm(direction)
    return direction, variance[:, 0]


def played(sketches: list[Array], beta2: float, momentum: float = 0.0) -> tuple[torch.Tensor, Memory]:
    first = torch.tensor(sketches[0], dtype=torch.float32)
    memory = Memory({"w": torch.zeros_like(first[..., 0])}, {"w": torch.zeros_like(first)} if momentum else {})
    for number, sketch in enumerate(sketches, start=1):
        direction = torch.tensor(sketch, dtype=torch.float32)
        memory = directions_({"w": direction}, memory, number, beta2, momentum)
    return direction, memory


def test_it_is_the_published_arithmetic_over_several_steps() -> None:
    generator = np.random.default_rng(0)
    rows = np.exp(generator.normal(0, 2, (17, 1)))
    sketches = [rows * generator.normal(size=(17, 5)) for _ in range(6)]
    direction, memory = played(sketches, 0.95)
    wanted, variance = transcription(sketches, 0.95)
    np.testing.assert_allclose(direction.numpy(), wanted, rtol=2e-5, atol=0)
    np.testing.assert_allclose(memory.variance["w"].numpy(), variance, rtol=2e-5)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 6), st.integers(-60, 60))
def test_a_layer_keeps_the_norm_of_its_sketch_at_any_size(seed: int, rows: int, rank: int, exponent: int) -> None:
    generator = np.random.default_rng(seed)
    sketches = [generator.normal(size=(rows, rank)) * 2.0 ** (exponent / 2) for _ in range(2)]
    direction, _ = played(sketches, 0.95)
    assert float(direction.double().norm()) == pytest.approx(float(np.linalg.norm(sketches[-1])), rel=1e-5)


def test_every_row_that_saw_a_gradient_of_its_usual_size_moves_alike() -> None:
    sketch = np.array([[1e-3, -1e-3], [5.0, 5.0], [200.0, -200.0]])
    direction, _ = played([sketch], 0.95)
    norms = direction.norm(dim=1)
    torch.testing.assert_close(norms / norms[0], torch.ones(3), rtol=1e-3, atol=0)  # but for epsilon


def test_a_zero_sketch_leaves_its_matrix_and_its_moment_alone() -> None:
    """Whether the matrix stands alone or is one expert of several, with a running mean or without."""
    generator = np.random.default_rng(1)
    first = generator.normal(size=(3, 4, 2))
    second = first.copy()
    second[1] = 0
    for momentum in (0.0, 0.9):
        before = played([first], 0.95, momentum)[1]
        direction, memory = played([first, second], 0.95, momentum)
        assert direction.isfinite().all()
        assert not direction[1].any()
        assert direction[0].any()
        assert torch.equal(memory.variance["w"][1], before.variance["w"][1])
        if momentum:
            assert torch.equal(memory.mean["w"][1], before.mean["w"][1])


def test_experts_are_scaled_each_by_itself() -> None:
    generator = np.random.default_rng(2)
    sketches = [generator.normal(size=(3, 7, 2)) for _ in range(3)]
    together, _ = played(sketches, 0.95)
    for expert in range(3):
        alone, _ = played([sketch[expert] for sketch in sketches], 0.95)
        torch.testing.assert_close(together[expert], alone, rtol=1e-6, atol=0)


def test_the_products_norm_is_that_of_the_dense_product() -> None:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(3, 11, 7, generator=generator)
    for columns in (301, 5000):  # in one part and in two
        projections = Projections(1, 2, torch.device("cpu"))
        gram = projections.gram("w", 7, columns)
        a = projections.signs("w", 7, columns).double() / math.sqrt(7)
        assert torch.equal(projections.gram("w", 7, columns), gram)
        torch.testing.assert_close(gram, a @ a.T)
        wanted = float((direction.double() @ a).square().sum())
        assert float(product_energy(direction, gram)) == pytest.approx(wanted, rel=1e-12)


def test_a_projections_product_is_formed_once_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def counted(*args: Any) -> torch.Tensor:
        drawn.append(args)
        return signs(*args)

    monkeypatch.setattr("trainer.sketch.projections.signs", counted)
    projections = Projections(1, 2, torch.device("cpu"))
    first = projections.gram("w", 7, 301)
    assert torch.equal(projections.gram("w", 7, 301), first)
    assert len(drawn) == 1
    projections.draw(3)
    assert not torch.equal(projections.gram("w", 7, 301), first)
    assert len(drawn) == 2


def test_the_weights_norm_is_summed_block_by_block() -> None:
    weight = torch.randn(700, 300, generator=torch.Generator().manual_seed(0))
    assert float(weight_energy(weight)) == pytest.approx(float(weight.double().square().sum()), rel=1e-6)
    experts = weight.view(2, 350, 300)[:, 50:]  # not contiguous
    assert float(weight_energy(experts)) == pytest.approx(float(experts.double().square().sum()), rel=1e-6)


def test_without_a_direction_there_is_no_step() -> None:
    assert step_size(6e-5, 9.0, 4.0) == pytest.approx(9e-5)
    assert step_size(6e-5, 9.0, 0.0) == 0.0
    for weights, directions in ((1.0, math.nan), (1.0, math.inf), (math.inf, 1.0)):
        with pytest.raises(AsyncRLError, match="not finite both"):
            step_size(6e-5, weights, directions)


def test_a_running_mean_is_carried_over_without_bias() -> None:
    """E[M A_old A_newᵀ A_new] = M A_old, and its norm grows on average as `growth` says."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(6, 8, generator=generator)
    old = signs(projection_key(0, 0, "w"), 8, 0, 64)
    kept = mean @ old.float() / math.sqrt(8)
    draws, total, sizes = 4000, torch.zeros(6, 64), []
    for update in range(1, draws + 1):
        new = signs(projection_key(0, update, "w"), 8, 0, 64)
        moved = carried(mean, old, new)
        sizes.append(float(moved.norm() / mean.norm()) ** 2)
        total += moved @ new.float() / math.sqrt(8) / draws
    assert float((total - kept).norm() / kept.norm()) < 2 * math.sqrt(64 / 8 / draws)
    assert math.sqrt(sum(sizes) / draws) == pytest.approx(growth(64, 8, 1.0, 1), rel=0.1)

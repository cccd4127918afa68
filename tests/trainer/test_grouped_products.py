"""Products of fused experts: grouped and one by one, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from async_rl.policy import grouped
from trainer.kernels import sketching

EXPERTS, IN, OUT, RANK = 5, 24, 16, 8
CHOSEN = [0, 3, 1, 3, 3, 0, 4, 3, 1]  # nobody goes to expert 2
BOTH = [torch.float32, torch.bfloat16]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).to(dtype)


def near(found: torch.Tensor, expected: np.ndarray) -> bool:
    tolerance = 2.0**-7 if found.dtype == torch.bfloat16 else 2e-6
    return bool(np.abs(found.double().numpy() - expected).max(initial=0) <= tolerance * max(1, np.abs(expected).max()))


def calls_of_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls, real = [], torch.nn.functional.grouped_mm

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    return calls


def test_bounds_say_where_each_experts_rows_begin() -> None:
    expert = torch.tensor(sorted(CHOSEN))
    assert grouped.sorted_bounds(expert, EXPERTS).tolist() == [0, 2, 4, 4, 8, 9]
    assert grouped.sorted_bounds(expert, EXPERTS).dtype == torch.int32
    assert grouped.sorted_bounds(expert[:0], EXPERTS).tolist() == [0] * 6


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("turned", [False, True])
def test_each_row_is_multiplied_by_its_own_expert_in_one_call(
    monkeypatch: pytest.MonkeyPatch, turned: bool, dtype: torch.dtype
) -> None:
    """The weight is a block of rows of a fused one, or that turned over; x a part of wider rows."""
    calls = calls_of_grouped_mm(monkeypatch)
    expert = torch.tensor(sorted(CHOSEN))
    weight = made((EXPERTS, 2 * OUT, IN), dtype, 0).chunk(2, dim=1)[1]
    weight = weight.transpose(1, 2) if turned else weight
    x = made((len(CHOSEN), 2 * weight.shape[1]), dtype, 1)[:, : weight.shape[1]]
    expected = np.einsum("ni,nio->no", x.double().numpy(), weight[expert].double().numpy())
    bounds = grouped.sorted_bounds(expert, EXPERTS)
    assert near(grouped.expert_products(x, weight, bounds), expected)
    assert len(calls) == 1
    assert near(grouped.separate_products(x, weight, bounds), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("out", "rank", "one_call"), [(OUT, RANK, True), (OUT, 7, False), (15, RANK, False)])
def test_each_expert_adds_its_own_rows_to_its_own_sketch(
    monkeypatch: pytest.MonkeyPatch, out: int, rank: int, one_call: bool, dtype: torch.dtype
) -> None:
    calls = calls_of_grouped_mm(monkeypatch)
    expert = torch.tensor(sorted(CHOSEN))
    g, p = made((len(CHOSEN), 2 * out), dtype, 0)[:, :out], made((len(CHOSEN), rank), dtype, 1)
    sketch = made((EXPERTS, out, rank), torch.float32, 2)
    expected = sketch.double().numpy()
    for row, number in enumerate(expert):
        expected[number] += 0.5 * np.outer(g[row].double().numpy(), p[row].double().numpy())
    untouched = sketch[2].clone()
    sketching.accumulate_groups_(sketch, g, p, grouped.sorted_bounds(expert, EXPERTS), 0.5)
    assert near(sketch, expected)
    assert torch.equal(sketch[2], untouched)
    assert len(calls) == one_call


def test_what_the_grouped_product_does_not_take_is_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_grouped_mm(monkeypatch)
    bounds = grouped.sorted_bounds(torch.tensor(sorted(CHOSEN)), EXPERTS)
    odd, narrow = made((EXPERTS, IN, 7), torch.float32, 0), made((EXPERTS, 3, OUT), torch.float32, 0)
    for weight in (odd, narrow, made((EXPERTS, IN, OUT), torch.float32, 0).double()):
        x = made((len(CHOSEN), weight.shape[1]), torch.float32, 1).to(weight.dtype)
        assert grouped.expert_products(x, weight, bounds).shape == (len(CHOSEN), weight.shape[2])
    assert not calls


@pytest.mark.parametrize("product", [grouped.expert_products, grouped.separate_products])
def test_no_tokens_give_nothing(product: Any) -> None:
    bounds = grouped.sorted_bounds(torch.zeros(0, dtype=torch.int64), EXPERTS)
    assert product(torch.empty(0, IN), torch.empty(EXPERTS, IN, OUT), bounds).shape == (0, OUT)
    sketch = torch.ones(EXPERTS, OUT, RANK)
    sketching.accumulate_groups_(sketch, torch.empty(0, OUT), torch.empty(0, RANK), bounds)
    assert bool((sketch == 1).all())

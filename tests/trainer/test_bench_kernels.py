"""The benchmark of kernels measures what it says: every operation once, and a ceiling that is the slower bound."""

from __future__ import annotations

import torch

from trainer.bench_kernels import Operation, Shape, ceiling, cells, operations, seconds

CPU = torch.device("cpu")
SMALL = Shape(rows=8, columns=16, rank=4, tokens=6)


def test_every_operation_is_measured_for_both_ways_of_keeping_weights() -> None:
    found = cells(SMALL, CPU, least=0.0)
    assert [cell.name for cell in found] == [
        f"{name}, {dtype}" for dtype in ("float32", "bfloat16") for name in ("apply", "project", "accumulate")
    ]
    for cell in found:
        assert cell.baseline == "ceiling"
        for arm in cell.arms:
            assert all(value > 0 for value in arm.measure().values())


def test_an_operation_counts_the_bytes_that_it_cannot_do_without() -> None:
    apply, project, accumulate = operations(SMALL, torch.float32, CPU)
    assert (apply.size, apply.products) == (2 * 8 * 16 * 4, 8 * 16 * 4)
    assert (project.size, project.products) == ((6 * 16 + 6 * 4) * 4, 6 * 16 * 4)
    assert (accumulate.size, accumulate.products) == ((6 * 8 + 6 * 4) * 4 + 2 * 8 * 4 * 4, 6 * 8 * 4)


def test_the_ceiling_is_the_slower_of_its_two_bounds() -> None:
    a = torch.ones(400, 400)
    slow = Operation("x", 64, 1, lambda: a @ a, {})
    copied = Operation("x", 1 << 24, 1, lambda: None, {})
    assert ceiling(slow, CPU, 0.0)["ms"] > 1e3 * seconds(lambda: None, CPU, 0.0) * 2
    assert ceiling(copied, CPU, 0.0)["gb_s"] < 1000

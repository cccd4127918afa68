"""The head on several ranks equals the head on one."""

from __future__ import annotations

from typing import Any

import torch
from near import assert_near
from rank_pool import run_ranks
from torch import nn

from trainer.head import Mixture, head_logprobs_and_mean


def make_case(n: int, vocabulary: int, dtype: torch.dtype, size: float, chunk_bytes: int, rows: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(n + vocabulary)
    return {
        "hidden": (size * torch.randn(n, 16, generator=random)).to(dtype),
        "weight": torch.randn(vocabulary, 16, generator=random).to(dtype),
        "target": torch.randint(0, vocabulary, (n,), generator=random),
        "ids": torch.randint(0, vocabulary, (n, 4), generator=random),
        "weights": torch.rand(n, 4, generator=random),
        "slopes": torch.randn(rows, n, generator=random),
        "temperature": 0.6,
        "chunk_bytes": chunk_bytes,
    }


SHAPES = [
    (23, 50, torch.float32, 1.0, 1 << 20),
    # A vocabulary that no number of ranks divides: by its own rows a rank would make other chunks than the next.
    (23, 51, torch.float32, 1.0, 400),
    (60, 51, torch.float32, 1.0, 1000),
    (5, 10, torch.float32, 1.0, 1),  # one at a time, and the last of four ranks has a single row
    (12, 50, torch.float32, 1e3, 1 << 20),  # logits whose exponentials are no float32
    (0, 50, torch.float32, 1.0, 1 << 20),  # nothing wanted
    (23, 50, torch.bfloat16, 1.0, 1 << 20),
]
CASES = [make_case(*shape, rows) for shape in SHAPES for rows in (1, 2)]  # without a mixture, and with one


def test_values_and_gradients_are_those_of_one_rank_and_nothing_given_is_written_to() -> None:
    for world in (1, 2, 4):
        for case, found in zip(CASES, run_ranks(world, "sharded_heads:compute", CASES)[-1], strict=True):
            values, gradient = one_rank(case)
            assert found["kept"]
            assert found["values"].dtype == torch.float32
            close(found["values"], values, 1e-5)
            assert found["gradient"].dtype == case["hidden"].dtype
            close(found["gradient"].float(), gradient.float(), 1e-5 if case["hidden"].dtype == torch.float32 else 2e-2)


def one_rank(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    head = nn.Linear(16, len(case["weight"]), bias=False, dtype=case["weight"].dtype).requires_grad_(False)
    head.weight.copy_(case["weight"])
    hidden = case["hidden"].clone().requires_grad_()
    mixture = Mixture(case["ids"], case["weights"])
    both = torch.stack(head_logprobs_and_mean(hidden, head, case["target"], mixture, case["temperature"]))
    values = both[: len(case["slopes"])]
    (values * case["slopes"]).sum().backward()
    assert hidden.grad is not None
    return values.detach(), hidden.grad


def close(found: torch.Tensor, wanted: torch.Tensor, relative: float) -> None:
    assert_near({"": found.float()}, {"": wanted.float()}, "head", relative)

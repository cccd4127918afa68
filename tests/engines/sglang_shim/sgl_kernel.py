"""Stands in for SGLang's compiled CPU kernels, which PyPI does not have: the one that every server calls, in PyTorch.
No operator is registered, so every layer takes SGLang's own PyTorch path. The others belong to speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    """table[rows[i], starts[i] : ends[i]] = the next ends[i] - starts[i] of `places`, for each request i; the table
    has `width` columns."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start]
        at += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    """Imported when SGLang's modules are, so they have to be there; not to be called."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this environment has no compiled CPU kernels for SGLang")

    return missing

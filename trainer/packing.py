"""Micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], attempts: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows into micro-batches such that rows × longest row ≤ `budget` tokens. Returns row numbers, longest
    first; the same input gives the same split.

    Rows of one attempt stay together, because a sequence-level ratio needs all its tokens at once. An attempt that
    alone exceeds the budget gets a micro-batch of its own: it cannot be trained otherwise."""
    units: dict[int, list[int]] = {}
    for row, attempt in enumerate(attempts):
        units.setdefault(attempt, []).append(row)
    # Longest first: neighbours are then of like length and little is padding.
    order = sorted(units.values(), key=lambda rows: -max(lengths[row] for row in rows))
    batches: list[list[int]] = []
    longest = 0
    for rows in order:
        if batches and (len(batches[-1]) + len(rows)) * longest <= budget:
            batches[-1] += rows
        else:
            longest = max(lengths[row] for row in rows)
            batches.append(list(rows))
    return batches


def padded_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Tokens that the model computes for these micro-batches, padding included."""
    return sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)

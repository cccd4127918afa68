"""Micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], attempts: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` tokens computed: the sum of their lengths, or rows × longest
    row when they are to be `padded`. Returns row numbers, longest first; the same input gives the same split.

    Rows of one attempt stay together, because a sequence-level ratio needs all its tokens at once. An attempt that
    alone exceeds the budget gets a micro-batch of its own: it cannot be trained otherwise."""
    units: dict[int, list[int]] = {}
    for row, attempt in enumerate(attempts):
        units.setdefault(attempt, []).append(row)
    # Longest first: neighbours are then of like length and little is padding.
    order = sorted(units.values(), key=lambda rows: -max(lengths[row] for row in rows))
    batches: list[list[int]] = []
    longest = tokens = 0
    for rows in order:
        more = sum(lengths[row] for row in rows)
        if batches:
            computed = (len(batches[-1]) + len(rows)) * longest if padded else tokens + more
            if computed <= budget:
                batches[-1] += rows
                tokens += more
                continue
        longest, tokens = max(lengths[row] for row in rows), more
        batches.append(list(rows))
    return batches


def computed_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]], *, padded: bool) -> int:
    """Tokens that the model computes for these micro-batches."""
    return sum(
        len(rows) * max(lengths[row] for row in rows) if padded else sum(lengths[row] for row in rows)
        for rows in batches
    )

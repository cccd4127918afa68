"""Routes of several sequences as those of one row, in the order in which a micro-batch has their tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_rl.routes import DTYPE, UNKNOWN


def missing_share(
    routes: Sequence[npt.NDArray[np.int16] | None], lengths: Sequence[int], layers: Sequence[int]
) -> float:
    """Of the choices that `layers` make for the first `lengths` tokens of each sequence, the share that is not known
    and stays theirs."""
    asked = sum(lengths) * len(layers)
    known = sum(
        int((each[:length, list(layers)] != UNKNOWN).all(axis=2).sum())
        for each, length in zip(routes, lengths, strict=True)
        if each is not None
    )
    return 1 - known / asked if asked else 0.0


def flat_routes(
    routes: Sequence[npt.NDArray[np.int16] | None], spans: Sequence[tuple[int, int]], total: int
) -> npt.NDArray[np.int16] | None:
    """Routes [total, layers, k] of sequences that lie at spans (start, length) of a row of `total` tokens, UNKNOWN
    between; None when none are known."""
    known = [each for each in routes if each is not None]
    if not known:
        return None
    out = np.full((total, *known[0].shape[1:]), UNKNOWN, dtype=DTYPE)
    for each, (start, length) in zip(routes, spans, strict=True):
        if each is not None:
            out[start : start + length] = each[:length]
    return out


def by_sequence(
    flat: npt.NDArray[np.int16], spans: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> list[npt.NDArray[np.int16]]:
    """The reverse: each sequence's routes [length of the whole sequence, layers, k], UNKNOWN after its span."""
    out = []
    for (start, length), whole in zip(spans, lengths, strict=True):
        each = np.full((whole, *flat.shape[1:]), UNKNOWN, dtype=DTYPE)
        each[:length] = flat[start : start + length]
        out.append(each)
    return out

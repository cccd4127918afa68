"""The running requests as rows of one batch, kept compact and sorted by policy.

Rows [0:n) of the KV cache are in use, and the rows of one policy are neighbours, so that a decode step works on
slices of the cache and never gathers it. When requests end or start, `plan_rows` says which rows move where, moving
as few as it can: new requests take the places of ended ones; with one policy, the last rows fill the other holes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

DEAD = -1  # as a policy, for plan_rows

# One record per row. Every field is 8 bytes wide, so that a column can be handed to torch as it is.
ROW_DTYPE = np.dtype(
    [
        ("seat", np.int64),  # where the request's buffers are; it stays when the row moves
        ("alive", np.int64),  # 0 when the request ended; the row is then decoded in vain until it is reused
        ("policy", np.int64),  # serial number of the policy that the next forward uses
        ("prompt_policy", np.int64),  # serial number of the policy that computed the prompt's part of the KV cache
        ("length", np.int64),  # tokens so far, prompt included; the last one is not in the KV cache yet
        ("token", np.int64),  # that last token
        ("produced", np.int64),  # new tokens so far
        ("limit", np.int64),  # new tokens at most
        ("temperature", np.float64),  # 1 where greedy
        ("greedy", np.int64),
        ("stale", np.int64),  # 1 when the KV cache must be computed (again) before the next decode
    ]
)


class RowPlan(NamedTuple):
    """Move rows `source` to `target` (all read before any is written); new requests go to rows `placed`, in the
    order in which they were given; rows [0:n) are in use afterwards."""

    source: IntArray
    target: IntArray
    placed: IntArray
    n: int


def plan_rows(current: IntArray, new: IntArray) -> RowPlan:
    """Arrange rows of policies `current` (DEAD: free to reuse) and new requests of policies `new`, compact and with
    one contiguous range per policy. Ranges keep their order; policies not yet running come last."""
    alive = current[current != DEAD]
    order = list(dict.fromkeys([*alive.tolist(), *new.tolist()]))
    source, target = [], []
    placed = np.empty(len(new), dtype=np.int64)
    start = 0
    for policy in order:
        rows = np.flatnonzero(current == policy)
        arriving = np.flatnonzero(new == policy)
        end = start + len(rows) + len(arriving)
        stays = (rows >= start) & (rows < end)
        holes = np.setdiff1d(np.arange(start, end), rows[stays], assume_unique=True)
        movers = rows[~stays]
        source.append(movers)
        target.append(holes[: len(movers)])
        placed[arriving] = holes[len(movers) :]
        start = end
    empty = np.empty(0, dtype=np.int64)
    return RowPlan(np.concatenate([empty, *source]), np.concatenate([empty, *target]), placed, start)


def policy_ranges(policies: IntArray) -> Iterator[tuple[int, int, int]]:
    """(policy, start, end) of each contiguous range."""
    if len(policies) and (policies == policies[0]).all():  # nearly always, and several times as fast
        yield int(policies[0]), 0, len(policies)
        return
    edges = np.flatnonzero(np.diff(policies)) + 1
    bounds = [0, *edges.tolist(), len(policies)]
    for start, end in pairwise(bounds):
        if end > start:
            yield int(policies[start]), start, end

"""Which data-parallel rank computes which sequences, and in which micro-batches.

Ranks wait for each other at every step's end, and, where experts are dealt out, in every layer of every micro-batch.
So their work has to be alike in sum, and they must have equally many micro-batches, whatever a batch is like: one that
has nothing left to compute gets empty ones.

Attempts are dealt to the ranks first, by the largest differencing method (Karmarkar and Karp 1982): the two most
uneven partial deals are combined, the fullest rank of one with the emptiest of the other. The ranks' costs then differ
by the dearest attempt at most, and mostly by far less. Then each rank packs what it has under the token budget, first
fit, longest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Balance(NamedTuple):
    """`shares[rank]` are a rank's micro-batches, as many on each: lists of row numbers, dearest first, empty where
    there is nothing to compute. `costs[rank]` is what a rank's rows cost: see `balance`."""

    shares: list[list[list[int]]]
    costs: list[float]


class _Unit(NamedTuple):
    """What stays together: the rows of one attempt, their tokens, and what they cost."""

    rows: list[int]
    tokens: int
    cost: float


def balance(
    lengths: Sequence[int],
    attempts: Sequence[int],
    ranks: int,
    budget: int,
    quadratic: float = 0.0,
    *,
    padded: bool = False,
) -> Balance:
    """Deal rows of `lengths` tokens to `ranks`, in micro-batches of at most `budget` tokens computed: with `padded`
    that is rows × the longest. Rows of one attempt stay together, as in `trainer.packing.pack`, and one that alone
    exceeds the budget gets a micro-batch of its own. The same input gives the same deal. No rows: no micro-batches.

    A row of n tokens costs n + `quadratic` · n², in units of what a token costs apart from attention: see
    `attention_share`."""
    units = _units(lengths, attempts, quadratic)
    deals = _deal(units, ranks)
    packed = [_pack(sorted(deal, key=_longest_first), budget, lengths, padded) for deal in deals]
    count = max(map(len, packed))
    shares = []
    for micro_batches in packed:
        spread = _spread(micro_batches, count)
        spread.sort(key=lambda micro_batch: -_cost(micro_batch))
        shares.append([[row for unit in micro_batch for row in unit.rows] for micro_batch in spread])
    return Balance(shares, [_cost(deal) for deal in deals])


class Dealer:
    """`balance` over a step's passes: what each rank computed in all of them, for `imbalance`. `budget` and `quadratic`
    as there."""

    def __init__(self, ranks: int, budget: int, quadratic: float) -> None:
        self._ranks, self._budget, self._quadratic = ranks, budget, quadratic
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._costs = [0.0] * self._ranks

    def deal(
        self, lengths: Sequence[int], attempts: Sequence[int], rank: int, *, padded: bool = False
    ) -> list[list[int]]:
        """The micro-batches of this rank."""
        dealt = balance(lengths, attempts, self._ranks, self._budget, self._quadratic, padded=padded)
        self._costs = [before + cost for before, cost in zip(self._costs, dealt.costs, strict=True)]
        return dealt.shares[rank]

    @property
    def imbalance(self) -> float:
        """Of all that was dealt since `begin`."""
        return imbalance(self._costs)


def imbalance(costs: Sequence[float]) -> float:
    """The busiest rank's cost in units of the mean: 1 at best, and where nothing costs anything."""
    total = sum(costs)
    return max(costs) * len(costs) / total if total else 1.0


def attention_share(attention_width: int, layer_parameters: int) -> float:
    """`quadratic` of a causal transformer: scores and their sums take 2 · width · n² operations a layer for a sequence
    of n tokens (half of all pairs, two products), its matrices 2 · parameters · n. `attention_width` is heads × head
    dimension, `layer_parameters` are those that a token meets in a layer: of experts, the chosen ones alone."""
    return attention_width / layer_parameters


def _units(lengths: Sequence[int], attempts: Sequence[int], quadratic: float) -> list[_Unit]:
    rows_of: dict[int, list[int]] = {}
    for row, attempt in enumerate(attempts):
        rows_of.setdefault(attempt, []).append(row)
    costs = [length + quadratic * length**2 for length in lengths]
    return [
        _Unit(rows, sum(lengths[row] for row in rows), sum(costs[row] for row in rows)) for rows in rows_of.values()
    ]


def _longest_first(unit: _Unit) -> tuple[int, int]:
    return -unit.tokens, unit.rows[0]


def _cost(units: Sequence[_Unit]) -> float:
    return sum(unit.cost for unit in units)


def _deal(units: Sequence[_Unit], ranks: int) -> list[list[_Unit]]:
    """Largest differencing: a partial deal is a list of ranks' (cost, units), dearest first."""
    heap: list[tuple[float, int, list[tuple[float, list[_Unit]]]]] = []
    for number, unit in enumerate(units):
        deal = [(unit.cost, [unit]), *((0.0, []) for _ in range(ranks - 1))]
        heap.append((deal[-1][0] - deal[0][0], number, deal))
    heapq.heapify(heap)
    number = len(units)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = [
            (ours + theirs, [*units_of_one, *units_of_other])
            for (ours, units_of_one), (theirs, units_of_other) in zip(one, reversed(other), strict=True)
        ]
        both.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], number, both))
        number += 1
    return [share for _, share in heap[0][2]] if heap else [[] for _ in range(ranks)]


def _pack(units: Sequence[_Unit], budget: int, lengths: Sequence[int], padded: bool) -> list[list[_Unit]]:
    """First fit; `units` are longest first."""

    def computed(some: Sequence[_Unit]) -> int:
        rows = [row for unit in some for row in unit.rows]
        return len(rows) * max(lengths[row] for row in rows) if padded else sum(unit.tokens for unit in some)

    packed: list[list[_Unit]] = []
    for unit in units:
        fits = (place for place, some in enumerate(packed) if computed([*some, unit]) <= budget)
        place = next(fits, None)
        if place is None:
            packed.append([unit])
        else:
            packed[place].append(unit)
    return packed


def _spread(micro_batches: list[list[_Unit]], count: int) -> list[list[_Unit]]:
    """`count` of them: the dearest that can be is cut in two, and where none can, empty ones are added. What is
    computed at the same time on several ranks is then more alike than a full micro-batch and an empty one."""
    out = list(micro_batches)
    while len(out) < count:
        several = [place for place, units in enumerate(out) if len(units) > 1]
        if not several:
            return out + [[] for _ in range(count - len(out))]
        place = max(several, key=lambda place: (_cost(out[place]), -place))
        out[place : place + 1] = _deal(out[place], 2)
    return out

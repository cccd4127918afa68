"""In which order the instances of a run's sources are asked: a function of seed and ticket alone, without a state.

Tickets take turns among the sources in proportion to their shares, as evenly as can be: the k-th turn of a source with
w of W shares stands at (2k + 1) / 2w of a round of W turns, and all turns are taken in that order. After n tickets a
source has had n w / W turns, give or take one half and w / W of half the sources' number.

Turn k of a source of n instances belongs to its epoch k // n, and each epoch is a permutation of its own: every
instance is asked once before any is asked again, whatever becomes of nodes, leases and processes, and of however many
shards the buffer is. A source that is read forward (`block` > 0) is permuted in blocks of so many rows in a row.

What a ticket asks after its first try comes from no epoch: any instance of the same source, in a source that is read
forward of the same block. So a retry neither loses nor repeats what the epoch has for another ticket; what it asks is
asked once more than the epoch promises.

Instances of all sources are numbered through: those of the first, then those of the second.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

ROUNDS = 6


class Source(NamedTuple):
    """`size` instances ≥ 1, `share` ≥ 1 of the turns; `block` rows are permuted at a time, 0 for all of them."""

    size: int
    share: int
    block: int


class Place(NamedTuple):
    """Where an instance lies: the source by its number, and the row of it."""

    source: int
    row: int


def shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the same proportion as positive weights, exactly as these are written in decimals."""
    exact = [Fraction(repr(weight)) for weight in weights]
    whole = [int(each * math.lcm(*(each.denominator for each in exact))) for each in exact]
    return [each // math.gcd(*whole) for each in whole]


def turn(share_of: Sequence[int], ticket: int) -> tuple[int, int]:
    """(source, k): ticket is the k-th turn of that source, both from 0."""
    rounds, place = divmod(ticket, sum(share_of))
    taken = _taken_before(share_of, place)
    source = min(range(len(share_of)), key=lambda s: (Fraction(2 * taken[s] + 1, share_of[s]), s))
    return source, rounds * share_of[source] + taken[source]


def _taken_before(share_of: Sequence[int], place: int) -> list[int]:
    """How many turns each source had when `place` turns of a round were taken. Those that stand before place / W are
    nearly these: half as many as there are sources are too many, or missing."""
    total = sum(share_of)
    taken = [(2 * place * share + total) // (2 * total) for share in share_of]
    while (surplus := sum(taken) - place) != 0:
        if surplus > 0:
            last = max(
                (s for s in range(len(taken)) if taken[s]), key=lambda s: (Fraction(2 * taken[s] - 1, share_of[s]), s)
            )
            taken[last] -= 1
        else:
            following = min(range(len(taken)), key=lambda s: (Fraction(2 * taken[s] + 1, share_of[s]), s))
            taken[following] += 1
    return taken


def permuted(key: str, size: int, place: int) -> int:
    """Where a permutation of range(size), chosen by `key`, takes `place`.

    A Feistel network over pairs (left, right) of which there are a few more than `size`: each round adds to one half a
    hash of the other, which can be undone, so the whole is a permutation of the pairs. What falls outside goes through
    again until it falls inside, which leaves a permutation of the rest (cycle walking)."""
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    while True:
        right, left = divmod(place, left_size)
        for number in range(0, ROUNDS, 2):
            left = (left + _word(f"{key}/{number}/{right}")) % left_size
            right = (right + _word(f"{key}/{number + 1}/{left}")) % right_size
        place = right * left_size + left
        if place < size:
            return place


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def row_of_turn(seed: int, number: int, source: Source, k: int) -> int:
    """The row that turn k of a source asks; `number` is the source's place among all."""
    epoch, place = divmod(k, source.size)
    start, length = block_of(source, place)
    return start + permuted(f"epoch/{seed}/{number}/{epoch}/{start}", length, place - start)


def block_of(source: Source, row: int) -> tuple[int, int]:
    """First row and length of the block that a row lies in: what is permuted together."""
    if not source.block:
        return 0, source.size
    start = row // source.block * source.block
    return start, min(source.block, source.size - start)


def asked(seed: int, sources: Sequence[Source], ticket: int) -> int:
    """The instance of a ticket's first try."""
    number, k = turn([source.share for source in sources], ticket)
    return first_of(sources, number) + row_of_turn(seed, number, sources[number], k)


def asked_instead(seed: int, sources: Sequence[Source], ticket: int, word: int) -> int:
    """Another one for the same ticket, which no epoch has a part in: of the same source (and block), by a random
    `word`."""
    place = place_of(sources, asked(seed, sources, ticket))
    start, length = block_of(sources[place.source], place.row)
    return first_of(sources, place.source) + start + word % length


def first_of(sources: Sequence[Source], number: int) -> int:
    """The number of a source's first instance."""
    return sum(source.size for source in sources[:number])


def place_of(sources: Sequence[Source], instance: int) -> Place:
    """Where an instance below the sum of all sizes lies."""
    ends = list(accumulate(source.size for source in sources))
    number = bisect_right(ends, instance)
    return Place(number, instance - (ends[number] - sources[number].size))

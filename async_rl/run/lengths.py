"""Is what trains as long as what was asked for? Dropping what is late drops what is long, and the model learns from the
rest; so a run says by how much the two differ, with the interval that chance alone allows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

SIGNIFICANT_BITS = 8  # lengths are kept exactly below 256 tokens, else to 1 in 128: few numbers at any context
ALPHA = 0.05

Lengths = Mapping[int, int]
"""How many answers have a length, by `length_bin`."""


def length_bin(tokens: int) -> int:
    """The length with all but its leading SIGNIFICANT_BITS bits cleared."""
    shift = max(0, tokens.bit_length() - SIGNIFICANT_BITS)
    return tokens >> shift << shift


def histogram(lengths: Iterable[int]) -> Counter[int]:
    return Counter(map(length_bin, lengths))


def added(parts: Iterable[Lengths]) -> Counter[int]:
    """The sum of histograms."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    return total


def length_bias(issued: Lengths, trained: Lengths) -> dict[str, Any] | None:
    """The Kolmogorov-Smirnov distance of the lengths that trained from those that were sampled, and the 95 % interval
    of the true one (Dvoretzky-Kiefer-Wolfowitz with Massart's constant, for each sample at half of the 5 %; it holds
    although what trained is part of what was sampled). None when one of them is empty."""
    n, m = sum(issued.values()), sum(trained.values())
    if not n or not m:
        return None
    bins = sorted(issued.keys() | trained.keys())
    of_issued, of_trained = (accumulate([part.get(each, 0) for each in bins]) for part in (issued, trained))
    distance = max(abs(one / n - other / m) for one, other in zip(of_issued, of_trained, strict=True))
    margin = sum(math.sqrt(math.log(4 / ALPHA) / (2 * count)) for count in (n, m))
    interval = [round(max(0.0, distance - margin), 4), round(min(1.0, distance + margin), 4)]
    return {
        "ks": round(distance, 4), "interval": interval, "sampled": n, "trained": m,
        "mean_tokens": {"sampled": round(_mean(issued), 2), "trained": round(_mean(trained), 2)},
    }  # fmt: skip


def waste(issued: Lengths, trained: Lengths) -> float | None:
    """The share of the tokens of good answers that did not train. None of nothing."""
    tokens = _tokens(issued)
    return round(max(0.0, 1 - _tokens(trained) / tokens), 4) if tokens else None


def _tokens(lengths: Lengths) -> int:
    return sum(length * count for length, count in lengths.items())


def _mean(lengths: Lengths) -> float:
    return _tokens(lengths) / sum(lengths.values())

"""Several optimiser steps on one batch: over disjoint parts of whole groups, all of them or none.

Groups stay whole, so that each part has the advantages of its groups about their own mean. In the first part the
policy is still the proximal one; from then on π_θ/π_prox differs from 1, and there is something to clip.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.backend import Sample


def split_groups(samples: Sequence[Sample], parts: int) -> list[list[int]]:
    """Places in `samples` of each part: whole groups in the order in which they come, as many groups in each part as in
    any other or one more. Fewer parts when there are fewer groups."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    n = max(min(parts, len(groups)), 1)
    part_of = {group: index * n // len(groups) for index, group in enumerate(groups)}
    split: list[list[int]] = [[] for _ in range(n)]
    for place, sample in enumerate(samples):
        split[part_of[sample.group]].append(place)
    return split

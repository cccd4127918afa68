"""How a request gets the same bits whatever else runs beside it, in whichever row, on whichever node: by fixed shapes.

How floating-point sums are grouped depends on the shapes of what is computed, and on little else: a product of 7 rows
and one of 64 may round the same row differently. So with `run.deterministic`

  - a decode step computes BLOCK rows at a time, always that many, over all positions of the cache, always as many; what
    is not a row of the step decodes in vain, at a position that no request has;
  - each distinct prompt is computed in a forward of its own, and never copied from a row that has it: its last token
    would go through the decode step then, and not through this forward;
  - sampling goes by BLOCK rows too;
  - the decode step is not compiled: when that happens depends on the clock.

Which row of a block a request has must not matter either. Nothing promises that of a matrix product, so it is shown:
tests/inference/test_exact_shapes.py compares bit for bit. It holds for float32 on a CPU with one thread (MKL, AVX-512);
processors of another kind round differently, so the nodes of such a run have to be alike.

What it costs, in tokens per CPU second of the quickstart's model: a third (128 slots: 0.65 of what varying shapes give,
32 slots: 0.70). Blocks of 32 rows give 0.52 and 0.88, of 128 rows 0.76 and 0.57.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

# A multiple of the widest vector twice over, so that no elementwise kernel has a rest of rows that it treats apart.
BLOCK = 64

Number = TypeVar("Number", bound=np.generic)


class Block(NamedTuple):
    """Rows [start:start+BLOCK), of which those in `used` (places in the block) are rows `source` of a step."""

    start: int
    used: slice
    source: slice

    def filled(self, values: npt.NDArray[Number], rest: float) -> npt.NDArray[Number]:
        """[BLOCK] of the step's values [n]: the block's own where they belong, and `rest` elsewhere."""
        out = np.full(BLOCK, rest, dtype=values.dtype)
        out[self.used] = values[self.source]
        return out


def blocks(step: range, rows: int) -> Iterator[Block]:
    """Blocks within `rows` (at least BLOCK) rows that cover those of a step, each once."""
    for first in range(step.start, step.stop, BLOCK):
        start, end = min(first, rows - BLOCK), min(first + BLOCK, step.stop)
        yield Block(start, slice(first - start, end - start), slice(first - step.start, end - step.start))


def why_not_exact(device: torch.device, dtype: torch.dtype) -> str:
    """Why an engine cannot promise the same bits; empty when it can."""
    if device.type != "cpu" or dtype != torch.float32:
        return (
            f"run.deterministic is shown for float32 on a CPU, and this engine runs {dtype} on {device.type}: set "
            'model.device = "cpu" and model.dtype = "float32"'
        )
    return ""

"""All sketches of a model in one buffer: one zero, one sum over ranks, and nothing else that is as large."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import distributed


class Sketches:
    """float32 tensors of the given `shapes`, by name, each a view of one flat buffer on `device`; zero at first."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self.flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)
        parts = self.flat.split(list(sizes.values()))
        self.views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    def zero(self) -> None:
        self.flat.zero_()

    def norm(self) -> float:
        """Of all together, summed in float64."""
        norms = torch.stack([torch.linalg.vector_norm(view) for view in self.views.values()])
        return float(torch.linalg.vector_norm(norms.double()))

    def reduce(self, group: distributed.ProcessGroup | None = None) -> None:
        """Sum over the ranks of `group` (of the default one): afterwards all hold the sketch of the whole batch, whose
        denominators are global. One call, which returns when the slowest rank has come, or raises after the group's
        own time-out."""
        distributed.all_reduce(self.flat, group=group)

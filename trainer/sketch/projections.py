"""The projections A of all blocks at one draw: made when first needed, forgotten at the next draw, never stored.

What is kept until then are signs, one byte each: a sixteenth of A and its gradient in float32 would be needed anyway.
"""

from __future__ import annotations

import math

import torch

from async_rl.policy.projection import ProjectionKey, projection_key, signs


class Projections:
    """Signs of projections on `device`, from the run's `base_seed`; `update` is the number of the step at which they
    were drawn, and names the draw."""

    def __init__(self, base_seed: int, update: int, device: torch.device) -> None:
        self.base_seed = base_seed
        self.update = update
        self._device = device
        self._signs: dict[str, torch.Tensor] = {}

    def draw(self, update: int) -> None:
        """From now on those of `update`."""
        if update != self.update:
            self.update = update
            self._signs.clear()

    def key(self, name: str) -> ProjectionKey:
        """What the projection of `name` is drawn by: a kernel draws it again rather than read it."""
        return projection_key(self.base_seed, self.update, name)

    def signs(self, name: str, rank: int, columns: int) -> torch.Tensor:
        """int8 [rank, columns] of ±1; A is this divided by √rank."""
        found = self._signs.get(name)
        if found is None:
            found = self._signs[name] = signs(self.key(name), rank, 0, columns, self._device).contiguous()
        return found

    def matrix(self, name: str, rank: int, columns: int) -> torch.Tensor:
        """A itself: float32 [rank, columns]."""
        return self.signs(name, rank, columns).float() / math.sqrt(rank)

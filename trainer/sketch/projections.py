"""The projections A of all blocks at one draw: made when first needed, forgotten at the next draw, never stored.

What is kept until then are the signs, a byte each, where no kernel draws them as it needs them; and elsewhere the
products A Aᵀ.
"""

from __future__ import annotations

import math

import torch

from async_rl.policy.factors import whole_float32
from async_rl.policy.projection import ProjectionKey, projection_key, signs

GRAM_COLUMNS = 4096  # drawn at a time


class Projections:
    """Signs of projections on `device`, from the run's `base_seed`; `update` is the number of the step at which they
    were drawn, and names the draw."""

    def __init__(self, base_seed: int, update: int, device: torch.device) -> None:
        self.base_seed = base_seed
        self.update = update
        self._device = device
        self._signs: dict[str, torch.Tensor] = {}
        self._grams: dict[str, torch.Tensor] = {}

    def draw(self, update: int) -> None:
        """From now on those of `update`."""
        if update != self.update:
            self.update = update
            self._signs.clear()
            self._grams.clear()

    def key(self, name: str) -> ProjectionKey:
        """What the projection of `name` is drawn by: a kernel draws it again rather than read it."""
        return projection_key(self.base_seed, self.update, name)

    def signs(self, name: str, rank: int, columns: int) -> torch.Tensor:
        """int8 [rank, columns] of ±1; A is this divided by √rank. Kept until the next draw."""
        found = self._signs.get(name)
        if found is None:
            found = self._signs[name] = signs(self.key(name), rank, 0, columns, self._device).contiguous()
        return found

    def gram(self, name: str, rank: int, columns: int) -> torch.Tensor:
        """A Aᵀ: float64 [rank, rank]. Kept until the next draw where the signs are not."""
        found = self._grams.get(name)
        if found is None:
            found = self._products(name, rank, columns)
            if name not in self._signs:
                self._grams[name] = found
        return found.double() / rank

    def _products(self, name: str, rank: int, columns: int) -> torch.Tensor:
        """Of the signs: float32 [rank, rank], integers, which it holds exactly up to 2²⁴ columns."""
        total = torch.zeros(rank, rank, dtype=torch.float32, device=self._device)
        with whole_float32():
            for start in range(0, columns, GRAM_COLUMNS):
                part = self.some(name, rank, start, min(start + GRAM_COLUMNS, columns)).float()
                total += part @ part.T
        return total

    def some(self, name: str, rank: int, start: int, stop: int) -> torch.Tensor:
        """Signs of some columns, and not kept if they were not before."""
        kept = self._signs.get(name)
        return signs(self.key(name), rank, start, stop, self._device) if kept is None else kept[:, start:stop]

    def matrix(self, name: str, rank: int, columns: int) -> torch.Tensor:
        """A itself: float32 [rank, columns]."""
        return self.some(name, rank, 0, columns).float() / math.sqrt(rank)

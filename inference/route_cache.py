"""Where tokens went in a mixture-of-experts model, kept beside the KV cache: for every position that this holds, the
experts under which it was computed.

So it is filled, moved and shared with the cache's rows, and a position that is computed again, as after a flip with
`recompute`, has the routes of the last time. It lies on the device until a request ends; a position takes less than a
hundredth of what its keys and values take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from async_rl.policy.routers import find_routers
from async_rl.routes import UNKNOWN
from inference.engine import EngineError


class RouteCache:
    """Of `rows` requests of up to `positions` tokens in a model of `layers` decoder layers: hooks on its routers note
    what each forward chose. Raises EngineError for a model without routers."""

    def __init__(self, model: nn.Module, layers: int, rows: int, positions: int, device: torch.device) -> None:
        routers = find_routers(model)
        if not routers:
            raise EngineError(
                f'[algorithm] router_replay = "rollout": {type(model).__name__} has no router that is known here, so '
                'no routes: set it to "none"'
            )
        self._layers = list(routers)
        (self._each,) = {router.each for router in routers.values()}
        shape = (rows, positions, layers, self._each)
        self._kept = torch.full(shape, UNKNOWN, dtype=torch.int16, device=device)
        self._seen: dict[int, torch.Tensor] = {}
        for layer, router in routers.items():
            router.module.register_forward_hook(self._note(layer))

    def _note(self, layer: int) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], out: tuple[torch.Tensor, ...]) -> None:
            self._seen[layer] = out[2].to(torch.int16)

        return note

    def decoded(self, start: int, positions_n: torch.Tensor) -> None:
        """The last forward computed `positions_n` of rows [start:start+n)."""
        rows = torch.arange(start, start + len(positions_n), device=self._kept.device)
        chosen_nlk = self._take(len(positions_n))
        self._kept[rows[:, None], positions_n[:, None], self._index] = chosen_nlk

    def prefilled(self, length: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """The last forward computed the first `length` positions of some sequences, and sequence sources[j] is that of
        row targets[j]."""
        chosen_btlk = self._take(-1).unflatten(0, (-1, length))
        # Of a longer request that had the row before, nothing is left.
        self._kept[targets] = UNKNOWN
        self._kept[targets[:, None, None], torch.arange(length)[:, None].to(targets), self._index] = chosen_btlk[
            sources
        ]

    def forget(self) -> None:
        """What the last forward chose is of no row: it only scored."""
        self._seen.clear()

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """As SlotCache.move."""
        self._kept[target, :length] = self._kept[source, :length]

    def of(self, row: int, length: int) -> npt.NDArray[np.int16]:
        """The first `length` positions of a row: [length, layers, k]."""
        routes: npt.NDArray[np.int16] = self._kept[row, :length].cpu().numpy()
        return routes.copy()

    @property
    def _index(self) -> torch.Tensor:
        return torch.tensor(self._layers, device=self._kept.device)

    def _take(self, tokens: int) -> torch.Tensor:
        """[tokens, routed layers, k] of the last forward. Raises EngineError when a router was not asked: without this
        the routes would be those of an earlier forward, or zeros."""
        seen, self._seen = self._seen, {}
        if missing := [layer for layer in self._layers if layer not in seen]:
            raise EngineError(f"the routers of layers {missing} were not called in a forward: routes are not known")
        chosen = torch.stack([seen[layer] for layer in self._layers], dim=1)
        if tokens >= 0 and len(chosen) != tokens:
            raise EngineError(f"{len(chosen)} tokens were routed in a forward of {tokens}")
        return chosen

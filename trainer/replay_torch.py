"""Router replay in a transformers model: tokens go to given experts, which the live router weighs.

Of a token's experts only the choice is given. Their weights come from the router's logits of this very forward, all of
them, by the router's own rule: so experts that it would not have chosen have weights and gradients too (a gather from
the scores that are left after its own choice would give zeros). Where the choice is not known the router's own holds.

R3 (arXiv 2510.11370) gives what the inference engine chose, R2 what this model chose in the pass before the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn

from async_rl.policy.routers import Router, find_routers
from async_rl.routes import UNKNOWN
from async_rl.schema import ConfigError


class _Served:
    """Routes [tokens, layers, k] of one forward, and how they compare with the live router's choice: of `known`
    (token, layer) pairs `changed` differ; `of_token` bool [tokens], in any layer. A forward that is computed again does
    not count again."""

    def __init__(self, routes: torch.Tensor) -> None:
        self.routes = routes
        self.known = self.changed = torch.zeros((), dtype=torch.int64, device=routes.device)
        self.of_token = torch.zeros(len(routes), dtype=torch.bool, device=routes.device)
        self.counts = True


class _Again:
    """The recomputation of what was computed while `served` was: it may be entered more than once."""

    def __init__(self, replay: Replay, served: _Served) -> None:
        self._replay, self._served = replay, served
        self._before: list[_Served | None] = []

    def __enter__(self) -> None:
        self._before.append(self._replay.served)
        self._replay.served = self._served

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replay.served = self._before.pop()


class Replay:
    """Hooks on every router of `model`. Raises ConfigError for a model without routers, or with one whose rule is not
    known."""

    def __init__(self, model: nn.Module) -> None:
        routers = find_routers(model)
        if not routers:
            raise ConfigError(
                f'[algorithm] router_replay: {type(model).__name__} has no router that is known here: set it to "none"'
            )
        if unknown := [layer for layer, router in routers.items() if router.weigh is None]:
            raise ConfigError(
                f"[algorithm] router_replay: how {type(routers[unknown[0]].module).__name__} in layer {unknown[0]} "
                'weighs experts is not known here, so it cannot be told others: set it to "none"'
            )
        self.layers = tuple(routers)
        self.served: _Served | None = None
        self._recorded: dict[int, torch.Tensor] | None = None
        self._finished: list[_Served] = []
        for layer, router in routers.items():
            router.module.register_forward_hook(self._hook(layer, router))

    def _hook(self, layer: int, router: Router) -> Callable[..., Any]:
        def answer(module: nn.Module, args: tuple[Any, ...], out: tuple[torch.Tensor, ...]) -> Any:
            logits, _, live = out
            served = self.served
            if self._recorded is not None:
                self._recorded[layer] = live
            if served is None:
                return None
            chosen = _chosen(served, layer, live)
            assert router.weigh is not None  # else __init__ had raised
            return logits, router.weigh(logits, chosen), chosen

        return answer

    @contextmanager
    def serving(self, routes: torch.Tensor | None) -> Iterator[None]:
        """What is computed within goes where `routes` int [tokens, layers, k] says, tokens in the order in which the
        model flattens them. None, and UNKNOWN in place of all k, leave it to the router."""
        if routes is None:
            yield
            return
        self.served = served = _Served(routes)
        try:
            yield
        finally:
            self.served, served.counts = None, False
            self._finished.append(served)

    def again(self) -> AbstractContextManager[None]:
        """For what is computed within `serving` now, and will be computed again in the backward pass: the context in
        which that has to be, so that it gets the same routes whatever is served by then."""
        return nullcontext() if self.served is None else _Again(self, self.served)

    @contextmanager
    def recording(self, into: list[torch.Tensor]) -> Iterator[None]:
        """Appends where the tokens of the one forward within went: int16 [tokens, layers up to the last routed, k]."""
        self._recorded = recorded = {}
        try:
            yield
        finally:
            self._recorded = None
        first = recorded[self.layers[0]]
        shape = (len(first), self.layers[-1] + 1, first.shape[1])
        routes = torch.full(shape, UNKNOWN, dtype=torch.int16, device=first.device)
        for layer, chosen in recorded.items():
            routes[:, layer] = chosen.to(torch.int16)
        into.append(routes)

    def forget(self) -> None:
        """What was served until now is of no interest to `metrics`."""
        self._finished = []

    def metrics(self) -> dict[str, float]:
        """Since the last call, or `forget`: `replay_changed`, the share of the (token, layer) pairs replayed where the
        live router chose another set, and `replay_changed_tokens`, that of the tokens to which this happened in some
        layer."""
        finished, self._finished = self._finished, []
        known = sum(int(served.known) for served in finished)
        tokens = sum(int(_known_tokens(served, self.layers).sum()) for served in finished)
        if not known:
            return {}
        changed = sum(int(served.changed) for served in finished)
        of_tokens = sum(int(served.of_token.sum()) for served in finished)
        return {"replay_changed": changed / known, "replay_changed_tokens": of_tokens / tokens}


def _chosen(served: _Served, layer: int, live: torch.Tensor) -> torch.Tensor:
    """Experts int64 [tokens, k] of a layer: those that are served where they are known, else the live ones."""
    if layer >= served.routes.shape[1] or len(live) != len(served.routes):
        raise ValueError(f"routes {list(served.routes.shape)} are served to layer {layer} with {len(live)} tokens")
    routes = served.routes[:, layer].long()
    known = (routes >= 0).all(dim=1)
    if served.counts:
        differs = known & (routes.sort(dim=1)[0] != live.sort(dim=1)[0]).any(dim=1)
        served.known = served.known + known.sum()
        served.changed = served.changed + differs.sum()
        served.of_token |= differs
    return torch.where(known[:, None], routes, live)


def _known_tokens(served: _Served, layers: Sequence[int]) -> torch.Tensor:
    return (served.routes[:, list(layers)] >= 0).all(dim=2).any(dim=1)

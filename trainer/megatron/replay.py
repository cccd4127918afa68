"""Router replay on ranks: tokens go to given experts, which the live router weighs (see trainer/replay_torch.py).

megatron-core asks an object at each router for the k experts of each token; here it is one of ours. Its own keeps the
routes of one micro-batch in each router, in the order in which layers were made, and has to be told when a layer is
computed again. Ours is served with what belongs to the micro-batch that a layer computes, each time that it computes it
(model.py), so neither several micro-batches in a pipeline nor recomputation can meet the wrong ones; and layers are
looked up by their numbers in the whole model, those without experts counted. Weights are gathered from all of the
router's scores, before anything is chosen among them.

No two experts of a token may be the same: megatron-core would quietly compute something else. Routes from engines are
checked when they arrive (async_rl.routes.check_routes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from async_rl.routes import UNKNOWN


class Served:
    """A micro-batch on its way through a rank's layers. `routes` int [own, layers, k] are those of the tokens that lie
    on this rank, None leaves it to the routers. `live`: what these chose, int16 [own, k] by layer, where it is to be
    known afterwards (a layer that is computed again chooses the same)."""

    def __init__(self, routes: torch.Tensor | None, tokens: int, *, traced: bool) -> None:
        self.routes = routes
        self.tokens = tokens
        self.live: dict[int, torch.Tensor] | None = {} if traced else None

    def choose(self, layer: int, live: torch.Tensor) -> torch.Tensor:
        """The experts int64 [own, k] that tokens go to in this layer: as served where that is known."""
        if self.live is not None:
            self.live[layer] = live.to(torch.int16)
        if self.routes is None:
            return live
        if layer >= self.routes.shape[1] or (len(live), live.shape[1]) != (len(self.routes), self.routes.shape[2]):
            raise ValueError(
                f"routes {list(self.routes.shape)} are served to layer {layer}, which has {list(live.shape)}"
            )
        routes = self.routes[:, layer].long()
        return torch.where(_known(routes)[:, None], routes, live)


class RouterReplay:
    """What megatron-core's TopKRouter of one layer (by its number in the whole model, from 0) asks."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.served: Served | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the experts of each token: [own, k] both, of the scores [own, experts] of all."""
        assert default_compute_topk is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.served is None):
            values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.served is None:
            return values, live
        chosen = self.served.choose(self.layer, live)
        return scores.gather(1, chosen), chosen


def attach(layers: Iterable[tuple[int, nn.Module]]) -> None:
    """Let the routers of these layers, each with its number in the whole model, ask for what is served to them."""
    for number, layer in layers:
        if (router := _router(layer)) is not None:
            router.router_replay = RouterReplay(number)


@contextmanager
def serving(layer: nn.Module, served: Served | None) -> Iterator[None]:
    """While this layer is computed, once."""
    router = _router(layer)
    if router is None or served is None:
        yield
        return
    router.router_replay.served = served
    try:
        yield
    finally:
        router.router_replay.served = None


def on_this_rank(routes: torch.Tensor, tokens: int, rank: int, ranks: int) -> torch.Tensor:
    """Of routes [n, layers, k], with UNKNOWN up to `tokens` (where a row was padded), those of a tensor rank's part."""
    padding = tokens - len(routes)
    whole = nn.functional.pad(routes, (0, 0, 0, 0, 0, padding), value=UNKNOWN)
    return whole.chunk(ranks)[rank]


class Counts(NamedTuple):
    """Over all data ranks: (token, layer) pairs whose experts are `known` because they were served, and of these
    `changed`, where the live router chose another set; tokens of which some layer was served, and of these those that
    some layer changed."""

    known: int
    changed: int
    tokens: int
    changed_tokens: int


class Trace:
    """Where tokens went in one call of `passes.run`. What it tells is asked for on all ranks at once."""

    def __init__(self) -> None:
        self.served: list[Served] = []

    def routes(self, model: Any) -> list[npt.NDArray[np.int16]]:
        """By micro-batch, int16 [tokens, layers, k]: on each rank of a data rank those of all its tokens in all layers,
        UNKNOWN in layers without experts. For what is to go there again (R2)."""
        out = []
        for served in self.served:
            own = _of_stage(model, served)
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=model.groups.pp)
            parts = [own]
            if model.parallel.sequence:
                parts = [torch.empty_like(own) for _ in range(model.parallel.tensor)]
                dist.all_gather(parts, own, group=model.groups.tp)
            out.append(torch.cat(parts)[: served.tokens].to(torch.int16).cpu().numpy())
        return out

    def counts(self, model: Any) -> Counts:
        """How what was served compares with the live routers."""
        sums = torch.zeros(len(Counts._fields), dtype=torch.int64, device=model.device)
        for served in self.served:
            _count(model, served, sums)
        for group in (model.groups.pp, model.groups.dp, *([model.groups.tp] if model.parallel.sequence else [])):
            dist.all_reduce(sums, group=group)
        return Counts(*(int(number) for number in sums))


def _count(model: Any, served: Served, sums: torch.Tensor) -> None:
    """Adds a micro-batch's. A token's layers lie in all stages, so what is said of tokens is added in the first one."""
    real = _real(model, served)
    known, changed = torch.zeros(2, real, dtype=torch.int32, device=model.device)
    for layer, chosen in _live(served):
        live = chosen[:real].long()
        given = torch.full_like(live, UNKNOWN) if served.routes is None else served.routes[:real, layer].long()
        differs = _known(given) & (given.sort(dim=1)[0] != live.sort(dim=1)[0]).any(dim=1)
        known += _known(given)
        changed += differs
    for number, each in enumerate((known, changed)):
        sums[number] += each.sum()
        dist.all_reduce(each, group=model.groups.pp)
        if model.groups.pp.rank() == 0:
            sums[2 + number] += each.count_nonzero()


def _own(model: Any, served: Served) -> int:
    """Tokens on this rank, padding included."""
    return -(-served.tokens // model.parallel.tensor) if model.parallel.sequence else served.tokens


def _real(model: Any, served: Served) -> int:
    """Those that are no padding."""
    own, before = _own(model, served), 0
    if model.parallel.sequence:
        before = model.groups.tp.rank() * own
    return max(0, min(own, served.tokens - before))


def _of_stage(model: Any, served: Served) -> torch.Tensor:
    """Where this rank's tokens went, int32 (gloo knows no int16) [own, layers, k]: UNKNOWN in layers of other stages,
    and in those without experts."""
    shape = (_own(model, served), model.config.num_hidden_layers, model.config.num_experts_per_tok)
    out = torch.full(shape, UNKNOWN, dtype=torch.int32, device=model.device)
    for layer, live in _live(served):
        out[:, layer] = served.choose(layer, live.long()).to(torch.int32)
    return out


def _live(served: Served) -> list[tuple[int, torch.Tensor]]:
    assert served.live is not None
    return list(served.live.items())


def _known(routes: torch.Tensor) -> torch.Tensor:
    return (routes >= 0).all(dim=1)


def _router(layer: nn.Module) -> Any:
    return getattr(layer.mlp, "router", None)

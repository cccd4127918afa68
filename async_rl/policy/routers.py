"""The routers of a mixture-of-experts model in transformers: where they are, and how they weigh the experts they chose.

A router is a module of a decoder layer that gives (logits [tokens, experts], scores [tokens, k], indices [tokens, k]).
How it makes scores of logits is not told by its type: each rule below is tried on numbers, and the one that gives the
router's own scores is its rule. Whoever wants other experts than the router chose weighs them by that rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from async_rl.errors import AsyncRLError

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
PROBE_TOKENS = 16
PROBE_SPREAD = 2.0  # of the logits that a router is tried on: some experts likely, some not, and none hopeless

Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [tokens, experts], indices int64 [tokens, k]) -> scores [tokens, k], in the logits' dtype."""


class Router(NamedTuple):
    """`weigh` gathers from all logits, so that an expert which the router did not choose has its score too, and a
    gradient. None: by no rule that is known here."""

    module: nn.Module
    experts: int
    each: int
    weigh: Weigh | None


def find_routers(model: nn.Module) -> dict[int, Router]:
    """By the number of their decoder layer, counted from the model's first, rising. Raises AsyncRLError when a layer
    has two."""
    found: dict[int, Router] = {}
    for name, module in model.named_modules():
        layer = LAYER.search(name)
        if layer is None or not _may_be_router(module):
            continue
        router = _probed(module)
        if router is None:
            continue
        if int(layer[1]) in found:
            raise AsyncRLError(f"{type(model).__name__}: decoder layer {layer[1]} has two routers, {name} is one")
        found[int(layer[1])] = router
    return dict(sorted(found.items()))


def _may_be_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(getattr(module, "top_k", None), int) and isinstance(weight, torch.Tensor) and weight.ndim == 2


@torch.no_grad()
def _probed(module: nn.Module) -> Router | None:
    """None when it does not answer as a router does."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    experts, width = weight.shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_TOKENS, width, generator=generator)
    size = float(weight.float().std()) * width**0.5
    hidden = (hidden * (PROBE_SPREAD / size if size > 0 else 1.0)).to(weight.device, weight.dtype)
    out = module(hidden)
    if not isinstance(out, tuple) or len(out) != 3:
        return None
    logits, scores, indices = out
    each = int(module.top_k)  # type: ignore[arg-type]
    if logits.shape != (PROBE_TOKENS, experts) or indices.shape != scores.shape or indices.shape[1] != each:
        return None
    allowed = 8 * torch.finfo(scores.dtype).eps
    scale = float(getattr(module, "routed_scaling_factor", 1.0))
    for rule in (_softmax, _softmax_of_chosen, _sigmoid, _sigmoid_of_chosen):
        weigh = _scaled(rule, scale)
        if torch.allclose(weigh(logits, indices).float(), scores.float(), rtol=allowed, atol=allowed):
            return Router(module, experts, each, weigh)
    return Router(module, experts, each, None)


def _scaled(rule: Weigh, scale: float) -> Weigh:
    def weigh(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        scores = rule(logits.float() if logits.dtype.itemsize < 4 else logits, indices)
        return (scores * scale if scale != 1.0 else scores).to(logits.dtype)

    return weigh


def _softmax(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).gather(-1, indices)


def _softmax_of_chosen(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _normalised(_softmax(logits, indices))


def _sigmoid(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return logits.sigmoid().gather(-1, indices)


def _sigmoid_of_chosen(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _normalised(_sigmoid(logits, indices))


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(-1, keepdim=True)

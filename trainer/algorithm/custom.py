"""A token loss of one's own, by import path, in place of the composed one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from async_rl.errors import AsyncRLError
from async_rl.imports import imported
from async_rl.schema import ConfigError
from trainer.algorithm.tokens import TokenData

TokenLoss = Callable[[torch.Tensor, TokenData], torch.Tensor]


@functools.cache
def load_loss(name: str) -> TokenLoss:
    """The function that "module:function" names, called with log π_θ [n] (differentiable) and the TokenData of the
    same tokens, whole attempts in no particular order, and to return a loss per token [n]; advantages, denominators and
    metrics stay the trainer's. What it returns is checked. Raises ConfigError when it cannot be imported."""
    function = imported(name, f"[algorithm] loss = {name!r}")
    if not callable(function):
        raise ConfigError(f"[algorithm] loss = {name!r} is not a function: it is a {type(function).__name__}")

    def checked(current: torch.Tensor, data: TokenData) -> torch.Tensor:
        losses = function(current, data)
        if not isinstance(losses, torch.Tensor) or losses.shape != current.shape or not losses.is_floating_point():
            found = (
                f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            )
            raise AsyncRLError(
                f"[algorithm] loss = {name!r} returned {found}: a floating-point tensor of shape "
                f"{list(current.shape)} is needed, one loss per trained token"
            )
        return losses

    return checked

"""Activation checkpointing: each decoder layer keeps only its input, and is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from async_rl.config import ConfigError

Again = Callable[[], AbstractContextManager[None]]
"""Called when a layer is computed; gives the context in which it has to be computed again."""


def checkpoint_layers(model: nn.Module, again: Again = nullcontext) -> int:
    """Let every decoder layer of `model` checkpoint itself where gradients are wanted; returns how many there are.
    What a layer computes must not change until the backward pass, but for what `again` restores. Raises ConfigError
    for a model without such layers.

    transformers' own switch acts in training mode only, in which dropout acts too, and the policy that is trained must
    be the one that is served. So this one has no regard to the mode; nothing random is computed twice."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"[trainer] activation_checkpointing = true: {type(model).__name__} has no layers that can be "
            "checkpointed; set it to false, and lower micro_batch_tokens if memory is short"
        )
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, again)
    return len(layers)


def _checkpointed(forward: Callable[..., Any], again: Again) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return checkpointed

"""An adapter merged into its model: W + scale · B A, rounded once to the dtype of W."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from async_rl.errors import AsyncRLError
from async_rl.policy.adapter import lora_scale, tensor_name
from async_rl.policy.experts import expert_modules, expert_weights, odd_layout
from trainer.peft_layout import module_of, stacks


@torch.no_grad()
def merge_adapter(model: nn.Module, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """In place; `tensors` and `config` as an adapter file has them. Products are float32. Raises AsyncRLError for a
    module or shape that the model has not, naming it."""
    scale = lora_scale(config)
    modules = {module_of(name).name for name in tensors if not module_of(name).path}
    for module in sorted(modules):
        a, b = (tensors.get(tensor_name(module, part)) for part in "AB")
        weight = getattr(dict(model.named_modules()).get(module), "weight", None)
        _add(module, weight, a, b, scale)
    for (path, projection), parts in stacks(tensors).items():
        experts = expert_modules(model).get(path)
        weight = None if experts is None or odd_layout(experts) else expert_weights(experts)[projection]
        _add(f"{path}.{projection}", weight, parts["A"], parts["B"], scale)


def _add(name: str, weight: Any, a: torch.Tensor | None, b: torch.Tensor | None, scale: float) -> None:
    if weight is None or a is None or b is None:
        raise AsyncRLError(f"adapter: {name} is no module of the model, or one of its tensors is missing")
    if weight.shape != (*b.shape[:-1], a.shape[-1]):
        raise AsyncRLError(
            f"adapter: {name}: {list(b.shape)} times {list(a.shape)} is not of the weight's shape {list(weight.shape)}"
        )
    a, b = a.to(weight.device, torch.float32), b.to(weight.device, torch.float32)
    weight.copy_(weight.float() + scale * (b @ a))
